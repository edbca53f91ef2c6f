"""A .csv or .tsv table of images, with the columns path and label.

It may also have the columns client (or site), domain, group (or patient) and split.

Paths are relative to the table's folder and never leave it. Rows are numbered as a spreadsheet does: the header is row 1.
The same column names are understood in the .json of webdataset shards and in Hugging Face datasets.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

from fedvlm.data.format import Format, Options, require_decoders
from fedvlm.data.source import MAX_ITEMS, NO_DOMAIN, Item, Source, existing, group_of, with_classes
from fedvlm.data.splits import FOLDERS, from_train
from fedvlm.errors import FedvlmError, nearest

ALIASES = {"site": "client", "patient": "group", "class": "label"}
OPTIONAL = ("client", "domain", "group", "split")
KNOWN = ("path", "label", *OPTIONAL)
SEPARATORS = ",;\t"
SHOWN = 3  # rows that an error names
MOST_FAULTS = 10  # that an error lists


class Table(Format):
    in_threads = True

    def recognises(self, name: str) -> bool:
        return name.endswith((".csv", ".tsv"))

    def open(self, name: str, options: Options) -> Source:
        return open_table(name, options.group, options.columns)


def open_table(name: str, group: str, mapped: Sequence[str] = ()) -> Source:
    path = existing(name, "data", "give a table with the columns path and label")
    rows = read_table(path, "data")
    if not rows:
        raise FedvlmError(f"data={path}: no rows below the header")
    fields, notes = columns(
        list(rows[0]), ("path", "label"), f"data={path}", mapping(mapped, list(rows[0]), f"data={path}")
    )
    found = [{name: row[column] for name, column in fields.items()} for row in rows]
    numbers = range(2, len(found) + 2)
    faults = [
        *fault("has no label", [n for n, r in zip(numbers, found, strict=True) if not r["label"]]),
        *fault("has no path", [n for n, r in zip(numbers, found, strict=True) if not r["path"]]),
    ]
    first: dict[str, int] = {}
    for number, row in zip(numbers, found, strict=True):
        if not row["path"]:
            continue
        try:
            row["path"] = inside(row["path"], f"row {number}")
        except FedvlmError as error:
            faults.append(str(error))
            continue
        if first.setdefault(row["path"], number) != number:
            faults.append(f"rows {first[row['path']]} and {number} are the same image, {row['path']}; remove one")
    root = path.resolve().parent
    faults += fault("names a file that is not there", [n for p, n in first.items() if not (root / p).is_file()], found)
    if faults:
        more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise FedvlmError(f"data={path}: {'; '.join(faults[:MOST_FAULTS])}{more}; correct the table")
    require_decoders(first)
    items = [item_of(r, r["path"], group, f"data={path}: row {n}") for n, r in zip(numbers, found, strict=True)]
    return checked(Source(path.stem, root, tuple(items), notes=notes))


def checked(source: Source) -> Source:
    """The source with what is said of its split; an error where it does not fit together."""
    homes: dict[str, Item] = {}
    for item in source.items:
        other = homes.setdefault(item.client, item)
        if item.client and other.domain != item.domain:
            raise FedvlmError(
                f"data={source.name}: the client {item.client} is in the domains {other.domain} ({other.path}) and "
                f"{item.domain} ({item.path}); a client has one domain"
            )
    given = {i.split for i in source.items}
    notes = source.notes + ((f"the split of the data is kept{from_train(given)}",) if given != {""} else ())
    return with_classes(replace(source, notes=notes, tabular=True))


def read_table(path: Path, key: str) -> list[dict[str, str]]:
    """The rows of a table by column, separated by commas, semicolons or tabs, whichever the header has most of."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(SEPARATORS, key=header.count), restval="", restkey="")
            rows = [{str(k).strip(): str(v).strip() for k, v in row.items() if k} for row in limited(reader)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise FedvlmError(f"{key}={path}: not a table in UTF-8 ({error}); save it as CSV UTF-8") from None
    except OSError as error:
        raise FedvlmError(f"{key}={path}: cannot be read ({error.strerror})") from None
    return rows


def limited(rows: Iterable[dict[str, str]]) -> Iterable[dict[str, str]]:
    for count, row in enumerate(rows):
        if count == MAX_ITEMS:
            raise FedvlmError(f"more than {MAX_ITEMS:,} rows; give a smaller table")
        yield row


def mapping(given: Sequence[str], header: list[str], what: str) -> dict[str, str]:
    """columns=path:file,label:diagnosis as column → known name."""
    found = {}
    for word in given:
        name, _, column = word.partition(":")
        if name not in KNOWN or not column:
            raise FedvlmError(f"columns={word}: expected NAME:COLUMN, with one of {', '.join(KNOWN)}")
        if column not in header:
            raise FedvlmError(f"columns={word}: {what} has no column {column}; {nearest(column, header)}")
        found[column] = name
    return found


def columns(
    given: list[str], needed: tuple[str, ...], what: str, mapped: Mapping[str, str] = {}
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Known name → the column that has it, and what is said of the others."""
    found: dict[str, str] = {}
    for column in given:
        name = mapped.get(column) or ALIASES.get(column.lower(), column.lower())
        if name in mapped.values() and column not in mapped:
            continue
        if name in KNOWN:
            if name in found:
                raise FedvlmError(f"{what}: the columns {found[name]} and {column} mean the same; remove one")
            found[name] = column
    for name in needed:
        if name not in found:
            example = f"; name it: columns={name}:{given[0]}" if given else ""
            raise FedvlmError(f"{what}: no column {name}; it has {', '.join(given) or 'none'}{example}")
    ignored = [c for c in given if c not in found.values()]
    return found, ((f"ignored columns: {', '.join(ignored)}",) if ignored else ())


def fault(what: str, rows: list[int], found: list[dict[str, str]] | None = None) -> list[str]:
    """What is wrong with these rows, as one text; nothing where there are none."""
    if not rows:
        return []
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    example = f" ({found[rows[0] - 2]['path']})" if found else ""
    return [f"row {', '.join(str(r) for r in rows[:SHOWN])}{more} {what}{example}"]


def inside(path: str, what: str) -> str:
    """A relative path that stays in its folder, separated by /."""
    plain = PurePosixPath(path.replace("\\", "/"))
    if plain.is_absolute() or PureWindowsPath(path).drive or ".." in plain.parts or "\0" in path:
        raise FedvlmError(
            f"{what}: {path!r} leads out of the table's folder; paths are relative to it: put the table into a folder that "
            "holds all images"
        )
    return plain.as_posix()


def item_of(row: Mapping[str, str], path: str, group: str, what: str) -> Item:
    """An item from the values of known columns; `group` is the regular expression that is used without a column."""
    for name in OPTIONAL:
        if name != "group" and name in row and not row[name]:
            raise FedvlmError(f"{what} has no {name}, while there is such a column; fill it, or leave the column out")
    split = row.get("split", "").lower()
    if split and split not in FOLDERS:
        raise FedvlmError(f"{what}: split={split}; expected train, val or test")
    client = row.get("client", "")
    home = row.get("domain") or client or NO_DOMAIN
    kept = row["group"] if "group" in row else group_of(group, path.rpartition("/")[2])
    return Item(path, home, row["label"], kept, FOLDERS.get(split, ""), client)
