"""The built site, opened in a browser.

It needs the extra `docs` and a Chromium: one that is installed, or Playwright's own
(`python -m playwright install chromium`).
"""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlparse

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
DESKTOP = {"width": 1300, "height": 900}
PHONE = {"width": 390, "height": 844}

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
    page.set_default_timeout(120_000)  # the notebooks are large, and others may run
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: _only(address, request.url, complaints))
    page.on("console", lambda message: _no_error(message, complaints))
    yield page
    page.close()
    assert complaints == []


def _only(address, url, complaints):
    if not url.startswith((address, "data:", "blob:")):
        complaints.append(f"asked for {url}")


def _no_error(message, complaints):
    if message.type == "error":
        complaints.append(message.text)


def pages(site):
    """The addresses of all pages."""
    address, folder = site
    for file in sorted(folder.rglob("index.html")):
        yield address + file.relative_to(folder).as_posix().removesuffix("index.html")


def test_pages_load_and_fit_a_phone(site, page):
    loaded = 0
    for url in pages(site):
        page.set_viewport_size(DESKTOP)
        assert page.goto(url).status == 200, url
        assert page.title(), url
        images = "[...document.querySelectorAll('article img')]"
        page.evaluate(f"{images}.forEach(image => image.loading = 'eager')")
        page.wait_for_load_state("networkidle")
        broken = f"{images}.filter(i => !i.naturalWidth).map(i => i.src)"
        assert page.evaluate(broken) == [], url
        page.set_viewport_size(PHONE)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], url
        loaded += 1
    assert loaded > 20


def test_links_and_their_anchors_hold(site, page):
    address, _ = site
    targets, anchors = {}, {}
    for url in pages(site):
        page.goto(url)
        anchors[_plain(page.url)] = set(
            page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        )
        links = page.evaluate(
            "[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))"
        )
        for link in links:
            targets.setdefault(urljoin(page.url, link), page.url)
    for target, origin in targets.items():
        url, anchor = urldefrag(target)
        if url.startswith(address):
            assert page.request.head(url).status == 200, (origin, target)
            if anchor:
                assert anchor in anchors[_plain(url)], (origin, target)
        else:
            assert urlparse(url).scheme in ("https", "mailto"), (origin, target)


def _plain(url):
    return urldefrag(url).url.removesuffix("index.html").rstrip("/")


def search(site, page, words):
    """The addresses that a search finds, the best first."""
    address, _ = site
    page.goto(address)
    page.locator("[data-md-component='search-query']").click()
    page.keyboard.type(words)
    results = page.locator(".md-search-result__link")
    results.first.wait_for()
    found = results.evaluate_all("links => links.map(link => link.href)")
    return [link.removeprefix(address) for link in found]


def test_search_finds_a_name(site, page):
    found = search(site, page, "CheckpointedScan")
    assert any(link.startswith("api/loops/") for link in found), found


@pytest.mark.parametrize("words", FIRST)
def test_search_begins_with_the_page_that_helps(site, page, words):
    found = search(site, page, words)
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
