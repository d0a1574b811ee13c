"""The documentation says what the code says: generated pages, links, names, examples, numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.config import CacheConfig
from scripts import generate_docs

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCE_PATH = re.compile(r"`((?:engine|csrc|tests|benchmarks|examples|scripts|docs)/[\w./-]*\w)`")
TEST_NAME = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def anchors_of(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_examples(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", generate_docs.PAGES)
def test_generated_page_is_fresh(name):
    assert (ROOT / "docs" / name).read_text() == generate_docs.PAGES[name](), (
        "run python scripts/generate_docs.py"
    )


def test_missing_page_is_stale(tmp_path):
    assert generate_docs.stale_pages(tmp_path) == list(generate_docs.PAGES)


def test_attribute_docs_join_lines_and_share_text_and_inherit():
    class Base:
        """First.

        Attributes:
            a, b: Of both,
                on two lines.
        """

    class Child(Base):
        """First.

        Attributes:
            c: Own: with a colon.

        After.
        """

    assert generate_docs.attribute_docs(Child) == {
        "a": "Of both, on two lines.",
        "b": "Of both, on two lines.",
        "c": "Own: with a colon.",
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        path = page.parent / target
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_and_tests_exist(page):
    text = page.read_text()
    for path in SOURCE_PATH.findall(text):
        assert (ROOT / path).exists(), path
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for test in TEST_NAME.findall(text):
        assert f"def {test}(" in tests, test


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_is_ascii(page):
    assert page.read_text().isascii()


def test_every_glossary_row_names_a_file():
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if "|" in line]
    assert len(rows) > 40
    for row in rows[2:]:
        assert SOURCE_PATH.search(row.rsplit("|", 2)[-2]), row


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_compile(page):
    for example in python_examples(page):
        compile(example, name_of(page), "exec")


def test_readme_example_runs():
    (example,) = python_examples(ROOT / "README.md")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("6 of 7\n")


def test_drawn_example_of_concepts_is_what_the_engine_does():
    rows = re.findall(r"^\| \d (\w+)[^|]*\|(.*)\|$", (ROOT / "docs/concepts.md").read_text(), re.M)
    documented = {name: [int(cell) for cell in cells.split("|")] for name, cells in rows}
    a, b = list(range(100, 117)), list(range(500, 516))
    edited = [*a[:6], 999, *a[7:]]
    requests = {
        "first": ("a", a[:10]),
        "growth": ("a", a[:15]),
        "eviction": ("b", b),
        "onload": ("a", a),
        "edit": ("a", edited),
        "shorter": ("a", edited[:9]),
    }
    assert list(documented) == list(requests)
    cache = CacheConfig(
        device_pages=6, page_size=4, chunk_size=8, host_bytes=1 << 20, allow_small_pool=True
    )
    with Engine.from_model_dir(None, EngineConfig(cache=cache, check_invariants=True)) as engine:
        for name, (user, history) in requests.items():
            usage = engine.rank(user_id=user, history=history, candidates=[1, 2]).usage
            engine.drain_transfers()
            views = [engine.core.user("", each) for each in "ab"]
            lengths = [
                (0, 0) if view is None else (view.device_len, view.host_len) for view in views
            ]
            found = [usage.device_tokens, usage.host_tokens, usage.computed_tokens]
            assert [len(history), *found, *lengths[0], *lengths[1]] == documented[name], name
