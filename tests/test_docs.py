"""The README and docs/: links lead somewhere, names are those of the code, figures are in their logs."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
ENVIRONMENT = {"NAME", "PYTHON", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "XDG_CACHE_HOME",
               "VLLM_CPU_KVCACHE_SPACE"}


def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if not link.startswith("https://")]
    for link in links:
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {link}: no such heading"
    if page == README:
        assert len(links) > 15


def test_every_page_of_docs_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in LINK.findall(README.read_text())}
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()


def test_readme_is_a_page():
    text = README.read_text()
    lines = text.splitlines()
    assert len(text.split()) <= 1500
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 110 and not line.startswith("|")] == []


def constants_of(path):
    """NAME -> source of its value, of the assignments at a module's top."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            found[node.target.id] = ast.unparse(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return found


def test_excerpt_of_the_constants():
    block = re.search(r"^ *```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)[1]
    excerpt = ast.parse("\n".join(line.strip() for line in block.splitlines())).body
    trainer = constants_of(ROOT / "train_dflash.py")
    assert len(excerpt) >= 5
    for node in excerpt:
        assert ast.unparse(node.value) == trainer[node.target.id], node.target.id


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page):
    """`NAME` in backticks, and NAME=... anywhere, are settings of the trainer or of a program."""
    known = set(ENVIRONMENT)
    for path in (ROOT / "train_dflash.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "dev").glob("*.py")):
        known |= set(constants_of(path))
    text = page.read_text()
    named = set(re.findall(r"`([A-Z][A-Z_]{2,})`", text)) | set(re.findall(r"\b([A-Z][A-Z_]+)=", text))
    assert named - known == set()


def table_after(heading):
    """Rows of the README's table with this first column, as lists of cells."""
    rows = []
    for line in README.read_text().split(f"\n| {heading} |")[1].splitlines()[2:]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_figures_are_in_their_logs():
    rows = table_after("measured")
    assert len(rows) >= 5
    for _, result, log in rows:
        text = (ROOT / LINK.search(log)[1]).read_text()
        numbers = re.findall(r"\d+(?:\.\d+)*", result)
        assert numbers, result
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", text), f"{number} is not in {log}"


def test_output_of_the_demo_is_its_log():
    log = (ROOT / "results/demo_cpu.txt").read_text().splitlines()
    block = next(text for text in README.read_text().split("```")[1::2] if "\ndone: " in text)
    for line in block.strip().splitlines():
        shown = line.removesuffix("...").rstrip()
        assert any(said.startswith(shown) for said in log), shown


def test_drawing_names_the_code():
    defined = set()
    for name in ("train_dflash.py", "flex_utils.py"):
        for node in ast.parse((ROOT / name).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                defined |= {f"{node.name}.{method}" for method in methods}
        defined |= set(constants_of(ROOT / name))
    drawn = re.findall(r'class="name[^"]*"[^>]*>([^<]+)<', (ROOT / "docs/data_path.svg").read_text())
    assert len(drawn) >= 10
    for text in drawn:
        for name in text.split(", "):
            assert name in defined
