"""The built site, opened in a browser.

It needs the extra `docs` and a Chromium: one that is installed, or Playwright's own
(`python -m playwright install chromium`).
"""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag, urlparse

import jax.numpy as jnp
import pytest

import eqloop as el

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]
FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}

# What is read of a page: the script is an expression of each.
READ = {
    "title": "document.title",
    "ids": "[...document.querySelectorAll('[id]')].map(e => e.id)",
    "links": "[...document.querySelectorAll('a[href]')].map(a => a.href)",
    "without_words": "images.filter(i => !i.alt.trim()).map(i => i.src)",
    "broken": "images.filter(i => !i.naturalWidth).map(i => i.src)",
    "sessions": "[...document.querySelectorAll('code[data-copy]')]"
    ".map(code => code.dataset.copy)",
    "others": "[...document.querySelectorAll('.highlight code:not([data-copy])')]"
    ".map(code => code.innerText)",
}

# The least contrast of text with what is behind it, and that text, in the colours that
# the page has now. It is computed as in the Web Content Accessibility Guidelines.
CONTRAST = """
() => {
  const pixel = document.createElement("canvas").getContext("2d");
  const colour = (text) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = text;
    pixel.fillRect(0, 0, 1, 1);
    return pixel.getImageData(0, 0, 1, 1).data;
  };
  const over = (above, below) =>
    below.map((b, i) => b + (above[i] - b) * above[3] / 255);
  const behind = (e) => e
    ? over(colour(getComputedStyle(e).backgroundColor), behind(e.parentElement))
    : [255, 255, 255];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = document.createTreeWalker(
    document.querySelector(".md-content"), NodeFilter.SHOW_TEXT);
  const looks = new Map(); // texts that look alike are one
  while (texts.nextNode()) {
    const node = texts.currentNode, e = node.parentElement;
    const text = node.textContent.trim();
    if (!text || !e.getClientRects().length || e.closest(".headerlink")) continue;
    const below = behind(e), above = over(colour(getComputedStyle(e).color), below);
    looks.set([...below, ...above].join(), [below, above, text]);
  }
  const contrasts = [...looks.values()].map(([below, above, text]) => {
    const [less, more] = [light(below), light(above)].sort((a, b) => a - b);
    return [(more + 0.05) / (less + 0.05), text];
  });
  return contrasts.sort(([a], [b]) => a - b)[0];
}
"""

# What people search for, and the page that should come first.
FIRST = {
    "save": "recipes/resume/",
    "resume": "recipes/resume/",
    "checkpoint": "api/checkpointing/",
    "out of memory": "recipes/out_of_memory/",
    "oom": "recipes/out_of_memory/",
    "truncated": "recipes/truncated_backpropagation/",
    "bptt": "recipes/truncated_backpropagation/",
    "float64": "recipes/precision/",
    "nan": "guides/debugging/",
    "progress": "guides/progress/",
    "multi gpu": "recipes/many_gpus/",
    "batch": "guides/maps/",
    "vmap memory": "guides/maps/",
    "while": "guides/while_loops/",
    "while loop gradient": "guides/while_loops/",
    "early stopping": "guides/while_loops/",
    "dataloader": "recipes/streaming_data/",
    "gradient accumulation": "guides/maps/",
    "lstm": "faq/",
    "rnn": "faq/",
    "slow": "symptoms/",
    "recompile": "faq/",
    "recompilation": "faq/",
    "overhead": "faq/",
    "every 100th": "guides/sliced_scan/",
    "every nth": "guides/sliced_scan/",
    "subsample": "guides/sliced_scan/",
    "rk4": "guides/sliced_scan/",
    "layers": "guides/stacked_layers/",
    "exploding gradients": "recipes/truncated_backpropagation/",
    "vanishing gradient": "recipes/truncated_backpropagation/",
    "dataset": "recipes/streaming_data/",
    "neural ode": "recipes/diffrax/",
    "sde": "recipes/diffrax/",
    "diffrax": "recipes/diffrax/",
    "freeze": "guides/stacked_layers/",
    "mamba": "recipes/state_space_models/",
    "state space": "recipes/state_space_models/",
    "spiking": "recipes/spiking_networks/",
    "mpc": "recipes/model_predictive_control/",
    "carry dtype": "faq/",
    "filter_jit": "faq/",
    "resource_exhausted": "symptoms/",
    "out of memory allocating": "symptoms/",
    "budget exceeded": "symptoms/",
    "memory grows": "symptoms/",
    "micro-batches": "guides/maps/",
    "unequal": "guides/maps/",
    "delay line": "guides/delay_lines_and_trees/",
    "implicit": "guides/while_loops/",
    "memory test": "recipes/memory_test/",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, format, *args):
        """Says nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built strictly and served from here."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True)
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", folder
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra `docs`")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        except api.Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(site, browser):
    """An empty page, which fails the test if it fetches from elsewhere or complains."""
    address, _ = site
    complaints = []
    page = browser.new_page(viewport=DESKTOP)
    _listen(page, address, complaints)
    yield page
    page.close()
    assert complaints == []


def _listen(page, address, complaints):
    """Notes what a page says is wrong, and what it fetches from elsewhere."""
    page.set_default_timeout(120_000)  # the notebooks are large, and others may run
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: _only(address, request.url, complaints))
    page.on("console", lambda message: _no_error(message, complaints))


def _only(address, url, complaints):
    if not url.startswith((address, "data:", "blob:")):
        complaints.append(f"asked for {url}")


def _no_error(message, complaints):
    if message.type == "error":
        complaints.append(message.text)


@pytest.fixture(scope="module")
def pages(site, browser):
    """What is on each page, by its address. All of them are opened once."""
    address, folder = site
    complaints, found = [], {}
    page = browser.new_page(viewport=DESKTOP)
    _listen(page, address, complaints)
    for file in sorted(folder.rglob("index.html")):
        path = file.relative_to(folder).as_posix().removesuffix("index.html")
        found[address + path] = _read(page, address + path)
    page.close()
    assert complaints == []
    assert len(found) > 20
    return found


def _read(page, url):
    """What is on a page: all of `READ`, how wide it is, and how legible."""
    assert page.goto(url).status == 200, url
    page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    page.wait_for_load_state("networkidle")
    script = ", ".join(f"{name}: {expression}" for name, expression in READ.items())
    images = "const images = [...document.querySelectorAll('article img')]"
    found = page.evaluate(f"() => {{ {images}; return {{ {script} }}; }}")
    found["widths"] = {}
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        width = page.evaluate("document.documentElement.scrollWidth")
        found["widths"][size["width"]] = width
    page.add_style_tag(content="* { transition: none !important; }")
    found["contrasts"] = {}
    for scheme in ("default", "slate"):
        page.evaluate(f"document.body.dataset.mdColorScheme = '{scheme}'")
        found["contrasts"][scheme] = page.evaluate(CONTRAST)
    return found


def test_pages_have_titles_and_pictures_with_words(pages):
    for url, found in pages.items():
        assert found["title"], url
        assert found["broken"] == [], url
        assert found["without_words"] == [], url


def test_no_page_scrolls_sideways(pages):
    for url, found in pages.items():
        assert all(width <= of for of, width in found["widths"].items()), url


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_text_is_legible(pages, scheme):
    for url, found in pages.items():
        contrast, text = found["contrasts"][scheme]
        assert contrast >= 4.5, (url, text)


def test_links_and_their_anchors_hold(site, pages, page):
    address, _ = site
    ids = {_plain(url): set(found["ids"]) for url, found in pages.items()}
    targets = {link: url for url, found in pages.items() for link in found["links"]}
    for target, origin in targets.items():
        url, anchor = urldefrag(target)
        if url.startswith(address):
            assert page.request.head(url).status == 200, (origin, target)
            if anchor:
                assert anchor in ids[_plain(url)], (origin, target)
        else:
            assert urlparse(url).scheme in ("https", "mailto"), (origin, target)


def _plain(url):
    return urldefrag(url).url.removesuffix("index.html").rstrip("/")


def test_what_is_copied_of_a_session_is_a_program(pages):
    sessions = [text for found in pages.values() for text in found["sessions"]]
    assert len(sessions) > 100
    for text in sessions:
        compile(text, "session", "exec")
        assert "doctest:" not in text
    for found in pages.values():
        assert not any(text.startswith(">>>") for text in found["others"])


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_code_is_copied_whole(site, browser, size):
    address, _ = site
    readme = (ROOT / "README.md").read_text()
    program = re.findall(r"```python\n(.*?)\n```", readme, re.DOTALL)[0]
    context = browser.new_context(viewport=size)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(address)
    block = page.locator(".highlight", has_text="class Cell")
    block.locator("[data-md-type='copy']").click()
    page.get_by_text("Copied to clipboard").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    context.close()
    assert copied == program


RESULTS = ".md-search-result__link"


def _look_for(page, words):
    """Searches for words on a page that may have the results of others."""
    box = page.locator("[data-md-component='search-query']")
    box.click()
    for text, state in (("", "detached"), (words, "attached")):
        box.fill(text)
        box.dispatch_event("keyup")
        page.locator(RESULTS).first.wait_for(state=state)


@pytest.fixture(scope="module")
def search(site, browser):
    """Finds the addresses for words, the best first, on a page that stays open."""
    address, _ = site
    complaints = []
    page = browser.new_page(viewport=DESKTOP)
    _listen(page, address, complaints)
    page.goto(address)

    def found(words):
        _look_for(page, words)
        links = "links => links.map(link => link.href)"
        results = page.locator(RESULTS).evaluate_all(links)
        return [link.removeprefix(address) for link in results]

    yield found
    page.close()
    assert complaints == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_search_leads_to_a_name(site, page, size):
    address, _ = site
    page.set_viewport_size(size)
    page.goto(address)
    if size == PHONE:
        page.locator("label[for='__search'].md-header__button").click()
    _look_for(page, "CheckpointedScan")
    page.locator(RESULTS).filter(has_text="CheckpointedScan").first.click()
    page.wait_for_url(address + "api/loops/**")
    page.locator("article mark", has_text="CheckpointedScan").first.wait_for()


@pytest.mark.parametrize("words", FIRST)
def test_search_begins_with_the_page_that_helps(search, words):
    found = search(words)
    assert found[0].startswith(FIRST[words]), found[:5]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reader_s_colours_are_taken(site, browser, scheme):
    address, _ = site
    page = browser.new_page(color_scheme=scheme)
    page.goto(address)
    expected = {"light": "default", "dark": "slate"}[scheme]
    page.wait_for_selector(f"body[data-md-color-scheme={expected}]")
    page.close()


def test_rows_that_a_box_finds(site, page):
    address, _ = site
    page.goto(address + "tables/?benchmarks=Recurrent+cells")
    rows = page.locator(".rows").first.locator("tbody tr")
    rows.first.wait_for()
    texts = rows.all_text_contents()
    assert texts
    assert all("Recurrent cells" in text for text in texts)
    page.get_by_label("Search claims").fill("0.12 misses")
    missed = page.locator(".rows").nth(1).locator("tbody tr").all_text_contents()
    assert missed
    assert all("misses" in text and "0.12" in text for text in missed)


def test_a_message_that_is_pasted_finds_its_error(site, page):
    address, _ = site
    page.goto(address + "errors/")
    entries = page.locator("details.error summary")
    entries.first.wait_for()
    with pytest.raises(TypeError) as raised:
        el.Scan(lambda h, x: (h + x, None))(jnp.zeros((), int), jnp.ones(3))
    page.get_by_label("Search errors").fill(str(raised.value))
    assert "must keep its shape, dtype and structure" in entries.first.text_content()
