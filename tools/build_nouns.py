"""Build the list of nouns from which FOCoOp's outsiders take their names: things one can see, from WordNet 3.0.

Usage: python tools/build_nouns.py /usr/share/wordnet fedvlm/data/assets/nouns.txt.gz

The folder is Debian's package wordnet-base (apt-get download wordnet-base; dpkg-deb -x wordnet-base*.deb here), or any
other that holds WordNet's data.noun. Its licence is written beside the list. A lemma stays if one of its meanings is in
a lexicographer file of FILES, which name physical things (acts, feelings, people, places and measures go); if it has
neither capitals nor digits (proper and Latin names go) and at most three words; and unless WordNet calls that meaning
obscene or vulgar. Sorted, one a line, without a time stamp: the same dictionary gives the same list.
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
RUDE = re.compile(r"\b(obscene|vulgar)\b")
WORD = re.compile(r"[a-z][a-z'-]+( [a-z][a-z'-]*){0,2}")


def lemmas(dictionary: Path) -> Iterator[str]:
    """offset, file, n, how many words (hexadecimal), then pairs of word and sense, pointers, | gloss: see wndb(5WN)."""
    for line in dictionary.read_text("utf-8").splitlines():
        if line.startswith("  "):  # the licence
            continue
        data, _, gloss = line.partition(" | ")
        fields = data.split(" ")
        if fields[1] in FILES and not RUDE.search(gloss):
            yield from (w.replace("_", " ") for w in fields[4 : 4 + 2 * int(fields[3], 16) : 2])


def license_text(dictionary: Path) -> str:
    """The first lines of every WordNet file, without their numbers."""
    lines = [line for line in dictionary.read_text("utf-8").splitlines() if line.startswith("  ")]
    return "\n".join(re.sub(r"^  \d+ ?", "", line).rstrip() for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the list of nouns from WordNet's dictionary.")
    parser.add_argument("folder", type=Path, help="where data.noun lies")
    parser.add_argument("output", type=Path, help="the list to write, .txt.gz")
    folder, output = vars(parser.parse_args()).values()
    dictionary = folder / "data.noun"
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
