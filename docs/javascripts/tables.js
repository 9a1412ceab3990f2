/* Tables that are too long for a page: a box, and the rows that have all of its words.

   A block of the class `rows` contains a link to its data, which readers without scripts
   see. The data has `columns` and `rows`; their cells are a little Markdown. In a block of
   the class `entries`, a row is an entry that opens: its first cell is its title. */
const MOST = 200; // rows that are shown at once

function inline(text) {
  const escaped = text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`);
  return escaped
    .replace(/`([^`]+)`/g, "<code>$1</code>")
    .replace(/\*\*([^*]+)\*\*/g, "<strong>$1</strong>")
    .replace(/\[([^\]]+)\]\(([^)\s]+)\)/g, (_, words, to) => `<a href="${address(to)}">${words}</a>`);
}

// Of another page, from one page of the site.
function address(to) {
  return to.replace(/^(?!https?:)(.*?)(?:index)?\.md/, (_, page) => `../${page && !page.endsWith("/") ? page + "/" : page}`);
}

function element(tag, content, ...children) {
  const made = document.createElement(tag);
  made.innerHTML = content;
  made.append(...children);
  return made;
}

function table(columns, rows) {
  const line = (tag, cells) => element("tr", cells.map((c) => `<${tag}>${inline(c)}</${tag}>`).join(""));
  const made = element("table", "", element("thead", "", line("th", columns)),
    element("tbody", "", ...rows.map((row) => line("td", row))));
  const wrapped = element("div", "", element("div", "", made));
  wrapped.className = "md-typeset__scrollwrap";
  wrapped.firstChild.className = "md-typeset__table";
  return [wrapped];
}

function entries(columns, rows) {
  const block = (column, text) =>
    /^(message|example)$/.test(column) ? element("pre", "", element("code", inline(text).replace(/<\/?(code|strong)>/g, "")))
      : element("p", inline(text));
  return rows.map(([title, ...cells]) => {
    const made = element("details", "", element("summary", inline(title)));
    cells.forEach((text, i) => text && made.append(block(columns[i + 1], text)));
    made.className = "error";
    return made;
  });
}

// A message has names and numbers of its own, so no row has all of its words. Those that
// have most of them come first, where a word counts by how few rows have it.
function closest(rows, texts, words) {
  const weights = words.map((word) => Math.log(rows.length / (1 + texts.filter((t) => t.includes(word)).length)));
  const score = (i) => words.reduce((sum, word, j) => sum + (texts[i].includes(word) ? weights[j] : 0), 0);
  return rows.map((row, i) => [score(i), row]).sort((a, b) => b[0] - a[0]).slice(0, 10).map(([, row]) => row);
}

async function fill(block) {
  const link = block.querySelector("a");
  const name = link.pathname.split("/").pop().replace(".json", "");
  const { columns, rows } = await (await fetch(link.href)).json();
  const isEntries = block.classList.contains("entries");
  const texts = rows.map((row) => row.join(" ").toLowerCase());
  const box = element("input", "");
  Object.assign(box, { type: "search", placeholder: "Words that rows contain", className: "md-input",
    value: new URLSearchParams(location.search).get(name) ?? "" });
  box.setAttribute("aria-label", `Search ${name}`);
  const count = element("p", ""), found = element("div", "");
  const show = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = rows.filter((_, i) => words.every((word) => texts[i].includes(word)));
    const those = all.length || !isEntries ? all : closest(rows, texts, words);
    count.textContent = `${those.length} of ${rows.length}` + (those.length > MOST ? `, of which ${MOST} are shown` : "");
    found.replaceChildren(...(isEntries ? entries : table)(columns, those.slice(0, MOST)));
  };
  box.addEventListener("input", show);
  block.prepend(box, count, found);
  show();
}

document.querySelectorAll(".rows").forEach(fill);
