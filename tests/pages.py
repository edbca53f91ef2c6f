"""The Markdown pages of the repository as tests see them: fenced blocks, the `fedvlm` commands in them, links, anchors."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = (
    *(f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *(
        p.relative_to(ROOT).as_posix()
        for d in ("docs", "examples", "benchmarks/papers/tables")
        for p in sorted((ROOT / d).glob("*.md"))
    ),
)
FENCE = re.compile(
    r"(?:^<!-- long: (?P<long>.+?) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = ("", "sh", "bash")
PROMPT = re.compile(r"^\w+\$ ")  # office$ fedvlm …
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Fence(NamedTuple):
    page: str
    line: int
    kind: str  # python, yaml, …; "" for none
    body: str
    long: str  # why the tests do not run it, as the page says in <!-- long: … --> before it; "": they do

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> list[Fence]:
    text = text_of(page)
    return [
        Fence(page, text.count("\n", 0, m.start("body")), m["kind"], m["body"], m["long"] or "")
        for m in FENCE.finditer(text)
    ]


def commands(fence: Fence) -> list[list[str]]:
    """The words of each line that is a `fedvlm` command, without the first."""
    if fence.kind not in SHELL:
        return []
    found = []
    for line in fence.body.replace("\\\n", " ").splitlines():
        if not re.search(r"(^|[ /])fedvlm ", line):
            continue
        words = shlex.split(PROMPT.sub("", line).replace(" · ", " ; "), comments=True)
        for part in split(words):
            if part and part[0].endswith("fedvlm"):
                found.append(part[1:])
    return found


def split(words: list[str]) -> list[list[str]]:
    """A line of the shell at && and ;, without assignments in front."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", ";", "|"):
            parts.append([])
        elif parts[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            parts[-1].append(word)
    return parts


def inline_commands(page: str) -> list[list[str]]:
    """`fedvlm …` in running text, where it names a method: not `fedvlm run …`, and not a command alone."""
    prose = FENCE.sub("", text_of(page))
    found = re.findall(r"(?<!`)`fedvlm ((?:run|bench|show|init) [^`…]+)`(?!`)", prose)
    return [shlex.split(words, comments=True) for words in found]


def links(page: str) -> list[str]:
    """Relative targets."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))
    return [target for target in LINK.findall(prose) if not re.match(r"\w+:", target)]


@cache
def anchors(page: str) -> frozenset[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", h).strip().replace(" ", "-") for h in plain)
