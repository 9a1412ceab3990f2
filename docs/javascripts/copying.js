// What the button beside a session of Python copies: what was typed, and no answers.
document.querySelectorAll(".highlight code").forEach((code) => {
  let typing = false;
  const typed = code.textContent.split("\n").filter((line) => {
    typing = /^>>>( |$)/.test(line) || (typing && /^\.\.\.( |$)/.test(line));
    return typing;
  });
  const programs = typed.map((line) => line.slice(4).replace(/\s*# doctest:.*/, ""));
  if (typed.length) code.dataset.copy = programs.join("\n");
});
