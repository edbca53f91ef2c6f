"""Build the list of nouns from which FOCoOp takes the names of outsiders: visible things, from WordNet 3.0.

Usage: python tools/build_nouns.py /usr/share/wordnet fedvlm/data/assets/nouns.txt.gz

The folder is that of Debian's package wordnet-base (apt-get download wordnet-base; dpkg-deb -x wordnet-base*.deb here) or
any other with WordNet's data.noun. WordNet's licence is written into the folder of the list. A lemma is kept if

- one of its meanings is in a lexicographer file of FILES, which name physical things (not acts, feelings, people, places
  or measures), and WordNet does not call that meaning obscene or vulgar;
- it has no capitals and no digits (which excludes proper and Latin names) and at most three words.

The list is sorted, one lemma per line, and has no time stamp: the same dictionary gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

FILES = {  # number in data.noun → name, from lexnames(5WN)
    "05": "animal",
    "06": "artifact",
    "08": "body",
    "13": "food",
    "17": "object",
    "19": "phenomenon",
    "20": "plant",
    "25": "shape",
    "27": "substance",
}
OFFENSIVE = re.compile(r"\b(obscene|vulgar)\b")
WORD = re.compile(r"[a-z][a-z'-]+( [a-z][a-z'-]*){0,2}")


def lemmas(dictionary: Path) -> Iterator[str]:
    """The lemmas of all meanings in FILES, with duplicates. The format is wndb(5WN): offset, file, "n", number of words
    (hexadecimal), pairs of word and sense, pointers, "|", gloss."""
    for line in dictionary.read_text("utf-8").splitlines():
        if line.startswith("  "):  # the licence
            continue
        data, _, gloss = line.partition(" | ")
        fields = data.split(" ")
        if fields[1] in FILES and not OFFENSIVE.search(gloss):
            yield from (w.replace("_", " ") for w in fields[4 : 4 + 2 * int(fields[3], 16) : 2])


def license_text(dictionary: Path) -> str:
    """WordNet's licence: the first lines of every one of its files, without the line numbers."""
    lines = [line for line in dictionary.read_text("utf-8").splitlines() if line.startswith("  ")]
    return "\n".join(re.sub(r"^  \d+ ?", "", line).rstrip() for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the list of nouns from WordNet's dictionary.")
    parser.add_argument("folder", type=Path, help="the folder with data.noun")
    parser.add_argument("output", type=Path, help="the list to write (.txt.gz)")
    args = parser.parse_args()
    output: Path = args.output
    dictionary: Path = args.folder / "data.noun"
    if not dictionary.is_file():
        raise SystemExit(f"{dictionary} was not found; unpack Debian's wordnet-base and give its usr/share/wordnet")
    found = sorted({w for w in lemmas(dictionary) if WORD.fullmatch(w)})
    header = [
        "# WordNet 3.0 nouns that name physical things: noun." + ", noun.".join(FILES.values()) + ".",
        "# No capitals, no digits, at most three words, nothing called obscene; made by tools/build_nouns.py.",
        "# Copyright 2006 by Princeton University; terms in WORDNET-LICENSE.txt.",
    ]
    text = "\n".join([*header, *found]) + "\n"
    output.write_bytes(gzip.compress(text.encode(), mtime=0))
    output.with_name("WORDNET-LICENSE.txt").write_text(license_text(dictionary), "utf-8")
    print(f"{len(found)} nouns, {output.stat().st_size / 1e3:.0f} kB: {output}")


if __name__ == "__main__":
    main()
