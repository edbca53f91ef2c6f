"""Hooks of mkdocs: pages of the site that are made when it is built.

One page a method (tools/method_pages.py), the API reference, the files at the root of the repository (SECURITY.md,
CHANGELOG.md, CONTRIBUTING.md), and the examples. Links between these and docs/ are rewritten, so that the same files can be
read in the repository.

    mkdocs build --strict        # writes build/site
"""

from __future__ import annotations

import re
from pathlib import Path

import method_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedvlm
from fedvlm import parts
from fedvlm.config import recipe

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {  # files that are pages, too
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"\[([^]\n]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LONG = re.compile(r"^<!-- long: (.+?) -->\n(```.*?^```)$", re.MULTILINE | re.DOTALL)
FIRST = ("run", "bench", "Run", "Runs", "load", "Predictor", "dataset")  # in the API reference


def on_config(config: MkDocsConfig) -> None:
    """The methods' pages by family, behind the last entry of their section; pages that no section names join the results."""
    assert config.nav is not None
    section = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    for family, title in method_pages.FAMILIES.items():
        found = [n for n in recipe.recipe_names() if method_pages.family(n) == family]
        section.append({title: [{recipe.load(n).title: f"methods/{n}.md"} for n in found]})
    listed = str(config.nav)
    results = next(entry["Results"] for entry in config.nav if "Results" in entry)
    results += [p.name for p in sorted((ROOT / "docs").glob("*.md")) if f"'{p.name}'" not in listed]


def on_files(files: Files, config: MkDocsConfig) -> None:
    def add(path: str, text: str) -> None:
        files.append(File.generated(config, path, content=text))

    for name, text in method_pages.pages().items():
        add(f"methods/{name}.md", text)
    for name, path in FROM_ROOT.items():
        add(path, (ROOT / name).read_text(encoding="utf-8"))
    add("api.md", api_page())
    for file in (p for p in sorted((ROOT / "examples").rglob("*")) if p.is_file() and "__pycache__" not in p.parts):
        path = file.relative_to(ROOT).as_posix()
        if path not in FROM_ROOT:
            files.append(File.generated(config, path, abs_src_path=str(file)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    homes = {made: name for name, made in FROM_ROOT.items()}
    if "/" not in path and path != "api.md":
        markdown = LINK.sub(lambda link: in_site(link, (ROOT / homes.get(path, f"docs/{path}")).parent), markdown)
    if path == "methods.md":
        markdown = with_method_links(markdown)
    return LONG.sub(r"\2\n<p class='long'>The tests check this block but do not run it (\1).</p>\n", markdown)


def in_site(link: re.Match[str], folder: Path) -> str:
    """A link of the repository as one of the site; what is not in the site is text."""
    text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
    path = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    if path in FROM_ROOT:
        return f"[{text}]({FROM_ROOT[path]}{anchor})"
    if target.is_dir():
        inside = [f"[{p.name}]({p.relative_to(ROOT).as_posix()})" for p in sorted(target.iterdir()) if p.is_file()]
        return f"[{text}](examples.md)" if path == "examples" else f"{text} ({', '.join(inside)})"
    found = path.startswith(("docs/", "examples/")) or not target.exists()
    return f"[{text}]({path.removeprefix('docs/')}{anchor})" if found else text


def with_method_links(markdown: str) -> str:
    """Names of recipes in the first column of a table lead to their pages."""

    known = recipe.recipe_names()

    def link(word: re.Match[str]) -> str:
        return f"[{word[0]}](methods/{word[0]}.md)" if word[0] in known else word[0]

    return re.sub(r"^\| [^|]+", lambda first: re.sub(r"[a-z][\w-]+", link, first[0]), markdown, flags=re.MULTILINE)


def api_page() -> str:
    """What `import fedvlm` and `import fedvlm.parts` have; mkdocstrings fills in signatures and docstrings."""
    homes = {name: home for home, names in fedvlm._HOMES.items() for name in names}
    lines = ["# API reference", (fedvlm.__doc__ or "").split("\n")[0] + "\n"]
    lines += ["Keys of `run` and `bench` are those of the command line: [every key](keys.md).\n"]
    lines += [f"::: {homes[name]}.{name}\n" for name in (*FIRST, *sorted(set(homes) - set(FIRST)))]
    lines += ["## For parts of your own"]
    lines += ["All are imported from `fedvlm.parts`; [add a method](add-a-method.md) shows how they are used.\n"]
    lines += [f"::: {home}.{name}\n" for home, names in parts._HOMES.items() for name in names]
    return "\n".join(lines)
