#!/usr/bin/env bash
# docs/federation.md, literally: a server, an office that starts runs and three hospitals, each in a network namespace with
# a home of its own, joined by a bridge. Prints what each party types and sees. Needs root, Linux, iproute2; tcpdump for the
# capture (left out where it is missing).
#
#     sudo PYTHON=.venv/bin/python bash benchmarks/walk.sh [FOLDER]    # FOLDER is kept; default: a temporary one, removed
#
# The package is copied first, so that editing it does not change its fingerprint while sites run. Exit code 1 where the
# disturbed run has other bits than the undisturbed one, a ledger disagrees, or bytes on the wire are not TLS.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(realpath -s "${PYTHON:-python3}")
keep=${1:-}
place=${keep:-$(mktemp -d)}
mkdir -p "$place" && place=$(cd "$place" && pwd)
parties=(server office north south west)
host=fedvlm.walk.test
tag=fvwalk$$
bridge=fvw$$
rounds=${ROUNDS:-150}
failed=0

# ---- a network with one namespace for each party ----
lay() {
    ip link add "$bridge" type bridge && ip link set "$bridge" up
    local k=0
    for who in "${parties[@]}"; do
        k=$((k + 1))
        ip netns add "$tag-$who"
        ip link add "fv$$-$k" type veth peer name eth0 netns "$tag-$who"
        ip link set "fv$$-$k" master "$bridge" up
        ip -n "$tag-$who" addr add "10.77.0.$k/24" dev eth0
        ip -n "$tag-$who" link set eth0 up
        ip -n "$tag-$who" link set lo up
        mkdir -p "/etc/netns/$tag-$who" "$place/$who"
        printf '127.0.0.1 localhost\n10.77.0.1 %s\n' "$host" >"/etc/netns/$tag-$who/hosts"
    done
}

clear_up() {
    for pid in "${started[@]:-}"; do [ -n "$pid" ] && kill -TERM "$pid" 2>/dev/null; done
    for pid in "${started[@]:-}"; do [ -n "$pid" ] && wait "$pid" 2>/dev/null; done
    for who in "${parties[@]}"; do
        ip netns del "$tag-$who" 2>/dev/null
        rm -rf "/etc/netns/$tag-$who"
    done
    rmdir /etc/netns 2>/dev/null
    ip link del "$bridge" 2>/dev/null
    [ -z "$keep" ] && rm -rf "$place"
}
started=()
trap clear_up EXIT
trap 'exit 143' INT TERM

# at PARTY COMMAND: as that party, in its home, on its network; what it types and sees is printed
at() {
    local who=$1
    shift
    printf '%s$ %s\n' "$who" "$*"
    as "$who" "$*" 2>&1 | tr '\r' '\n' | tail -n "${LINES_SHOWN:-40}" | cut -c 1-220 | sed 's/^/    /'
    return "${PIPESTATUS[0]}"
}
as() { "${enter[@]/PARTY/$1}" "$2"; }
# background PARTY FILE COMMAND: goes on; what it prints is in the party's FILE; its process is $last
background() {
    printf '%s$ %s   # stays in this terminal\n' "$1" "$3"
    set -m # a process group of its own, as in a terminal
    "${enter[@]/PARTY/$1}" "$3" >>"$place/$1/$2" 2>&1 </dev/null &
    last=$!
    set +m
    started+=("$last")
}
# (signals that were ignored when this script was started would stay ignored)
enter=(ip netns exec "$tag-PARTY" env -i --default-signal=INT,QUIT HOME="$place/PARTY" PATH="$place/bin:$PATH"
    PYTHONPATH="$place/code"
    OMP_NUM_THREADS=1 LANG=C.UTF-8 bash -c 'cd && eval "exec $0"')
until_true() { # SECONDS COMMAND
    local end=$((SECONDS + $1))
    shift
    until eval "$*"; do
        [ $SECONDS -lt $end ] || { echo "FAILED: waited too long for: $*"; failed=1; return 1; }
        sleep 0.5
    done
}
saw() { sed 's/^/    /' "$place/$1/$2" | tr '\r' '\n' | cut -c 1-220 | tail -n "${3:-12}"; }
title() { printf '\n== %s (at %d s)\n' "$*" "$SECONDS"; }
fails() { echo "FAILED: $*"; failed=1; }
hash_of() { # of the shared tensors of a run folder
    "$python" - "$1/state.safetensors" <<'PY'
import hashlib, sys
from safetensors.numpy import load_file
seen = hashlib.sha256()
for name, x in sorted(load_file(sys.argv[1]).items()):
    if name.startswith("shared/"):
        seen.update(name.encode() + x.tobytes())
print(seen.hexdigest())
PY
}
# wire CAPTURE IMAGES RUN: puts the TCP streams together; each must be TLS records to its end, and no name of a file, class
# or tensor may be readable in it
wire() {
    "$python" - "$@" <<'PY'
import re, struct, sys
from collections import Counter, defaultdict
from pathlib import Path
raw, images, run = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), sys.argv[3]
streams, at, packets, syn = defaultdict(dict), 24, 0, {}
while at + 16 <= len(raw):
    size = struct.unpack_from("<I", raw, at + 8)[0]
    frame, at, packets = raw[at + 16 : at + 16 + size], at + 16 + size, packets + 1
    ip = frame[14:]
    if frame[12:14] != b"\x08\x00" or ip[9] != 6:
        continue
    tcp = ip[(ip[0] & 15) * 4 : struct.unpack_from(">H", ip, 2)[0]]
    source, target, number = struct.unpack_from(">HHI", tcp)
    key = (ip[12:16], source, ip[16:20], target)
    if tcp[13] & 2:
        syn[key] = number
    if data := tcp[(tcp[12] >> 4) * 4 :]:
        old = streams[key].get(number, b"")
        streams[key][number] = max(old, data, key=len)
ports, kinds, odd, total, partial = Counter(), Counter(), [], 0, 0
words = {b"state.safetensors", b"rotation", b"fedot", run.encode(), b"dtype", b"shared/"}
words |= {p.name.encode() for p in images.rglob("*") if p.is_file()}
for key, parts in streams.items():
    if key[1] != 8002 and key[3] != 8002:
        ports[f"{key[1]}>{key[3]}"] += 1
    first = syn.get(key)
    whole, expected, gap = bytearray(), None if first is None else first + 1, first is None
    for number in sorted(parts, key=lambda n: (n - (first or min(parts))) % 2**32):
        data = parts[number]
        expected = number if expected is None else expected
        if number > expected:
            gap = True
            break
        whole += data[expected - number :]
        expected += max(0, len(data) - (expected - number))
    total += sum(map(len, parts.values()))
    odd += [f"{w!r} is readable" for w in words if w in bytes(whole)]
    place, records = 0, 0
    while not gap and place + 5 <= len(whole):
        kind, version, length = whole[place], whole[place + 1 : place + 3], struct.unpack_from(">H", whole, place + 3)[0]
        if kind not in (20, 21, 22, 23) or version[0] != 3 or length > 16640:
            odd.append(f"{key}: no TLS record at byte {place}")
            break
        if records == 0 and kind == 22 and whole[place + 5] == 2:  # the server's hello; version 1.3 is an extension of it
            kinds["TLS 1.3" if b"\x00\x2b\x00\x02\x03\x04" in whole[: length + 5] else "TLS 1.2"] += 1
        place, records = place + 5 + length, records + 1
    partial += gap
print(f"{packets} packets, {total:,} bytes in {len(streams)} streams, one for each direction")
odd += [f"{partial} streams have gaps"] if partial else []
print(f"connections: {dict(kinds)}; other ports than 8002: {dict(ports) or 'none'}; words sought: {len(words)}")
print("\n".join(odd[:10]) or "all of it is TLS; none of the words is readable")
sys.exit(bool(odd))
PY
}
rows() { wc -l 2>/dev/null <"$1/rounds.jsonl" || echo 0; }
played() { [ "$(rows "$1")" -gt "$2" ]; }

title "fedvlm, as installed on each machine, and the hospitals' images"
mkdir -p "$place/code" "$place/bin"
cp -r "$root/fedvlm" "$place/code/"
find "$place/code" -name __pycache__ -prune -exec rm -rf {} +
printf '#!/bin/sh\nexec "%s" -m fedvlm "$@"\n' "$python" >"$place/bin/fedvlm"
chmod +x "$place/bin/fedvlm"
"$python" - "$root/fedvlm/data/assets/emoji.zip" "$place" <<'PY'
import sys, zipfile
from pathlib import Path
box, place = zipfile.ZipFile(sys.argv[1]), Path(sys.argv[2])
classes, each = ("bird", "clock", "fruit", "hand", "train"), 12
names = box.namelist()
styles = [s for s in sorted({n.split("/")[0] for n in names})
          if all(sum(n.startswith(f"{s}/{c}/") for n in names) >= each for c in classes)]
for site, style in zip(("north", "south", "west"), styles):
    for label in classes:
        for name in sorted(n for n in names if n.startswith(f"{style}/{label}/"))[:each]:
            path = place / site / "images" / label / Path(name).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(box.read(name))
            if site != "west":  # comes later
                other = place / "reference" / site / label / path.name
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(box.read(name))
PY
lay || exit 1
for who in "${parties[@]}"; do echo "$who: $(ip -n "$tag-$who" -br addr show eth0 | tr -s ' ')"; done
for who in north south west; do echo "$who: $(find "$place/$who/images" -type f | wc -l) images"; done

title "1. The office makes the kits"
at office "fedvlm federation init north south name=walk host=$host port=8002 out=walk" || fails init
at office "ls -ln walk"

title "2. Each kit goes to its party"
for who in server north south; do install -m 600 "$place/office/walk/$who.zip" "$place/$who/$who.zip"; done

title "3. The server (from here to step 8 its traffic is captured)"
tcpdump=$(command -v tcpdump || true)
if [ -n "$tcpdump" ]; then
    ip netns exec "$tag-server" "$tcpdump" -i eth0 -U -w "$place/wire.pcap" -Z root tcp >/dev/null 2>&1 &
    capture=$!
    sleep 1
fi
background server serve.txt "fedvlm serve server.zip"
serves=$last
until_true 120 "grep -q listening '$place/server/serve.txt'"
saw server serve.txt

title "4. The hospitals"
printf 'methods: [fedot, fedavg]\nsmallest_cohort: 2\ncounts: true\nsmallest_examples: 4\n' >"$place/north/site.yaml"
for who in south west; do mkdir -p "$place/$who"; printf 'smallest_examples: 4\n' >"$place/$who/site.yaml"; done
at north "cat site.yaml"
declare -A joined
for who in north south; do
    rules=" rules=site.yaml"  # about seven images of a class are trained on
    background $who join.txt "fedvlm join $who.zip data=images$rules"
    joined[$who]=$last
done
for who in north south; do until_true 180 "grep -q 'has joined' '$place/$who/join.txt'" && echo "$who sees:" && saw $who join.txt; done
echo "the server sees:" && saw server serve.txt
at office "fedvlm federation status walk/admin.zip"

title "5. A run, undisturbed"
began=$SECONDS
LINES_SHOWN=30 at office "fedvlm run fedot rounds=$rounds federation=walk/admin.zip out=runs/undisturbed" || fails "the undisturbed run"
echo "took $((SECONDS - began)) s"

title "6. The same run in one process, on all images"
as office "fedvlm run fedot rounds=$rounds data=$place/reference engine=serial out=runs/serial" >"$place/office/serial.txt" 2>&1 || { fails "the serial run"; saw office serial.txt; }
one=$(hash_of "$place/office/runs/undisturbed") other=$(hash_of "$place/office/runs/serial")
echo "shared tensors, SHA-256: federation $one"
echo "                        one process $other"

title "7. Afterwards: what each party has"
run=$(basename "$(ls -d "$place"/north/.local/share/fedvlm/walk/north/runs/*/ | head -1)")
home=.local/share/fedvlm/walk
at office "ls -l runs/undisturbed"
at north "ls -lR $home/north" 
at server "ls -l $home/server/runs/$run"
image=$(cd "$place/north" && find images -type f | sort | head -1)
at north "fedvlm predict $home/north/runs/$run $image --client north" || fails predict
at north "fedvlm export $home/north/runs/$run --client north --out model" || fails export
at north "fedvlm predict $home/north/runs/$run $image" || fails "predict with the shared model"
at office "fedvlm predict runs/undisturbed --client north $place/reference/north/bird/$(basename "$image")" && fails "the office has north's own model"

title "8. The ledger"
LINES_SHOWN=8 at north "fedvlm ledger"
at north "fedvlm ledger --verify" || fails "north's ledger"
mkdir -p "$place/north/from-office" && cp "$place/office/runs/undisturbed/received.jsonl" "$place/north/from-office/"
at north "fedvlm ledger --compare from-office" || fails "north's ledger and the server's side"

title "9. What is on the wire"
if [ -n "$tcpdump" ]; then
    kill -INT "$capture" && wait "$capture"
    wire "$place/wire.pcap" "$place/north/images" "$run" || fails "the wire"
else
    echo "tcpdump is not installed: no capture"
fi

title "10. A network cut of 20 s in the middle of a run"
for who in north south; do rm -rf "$place/$who/$home/$who/runs"; done
at office "fedvlm federation forget walk/admin.zip $run" || fails forget
background office cut.txt "fedvlm run fedot rounds=$rounds federation=walk/admin.zip out=runs/cut"
follows=$last
until_true 300 "played '$place/office/runs/cut' $((rounds / 4))"
ip -n "$tag-south" link set eth0 down
echo "south's network is down after $(rows "$place/office/runs/cut") records"
sleep 20
ip -n "$tag-south" link set eth0 up
echo "south's network is up after $(rows "$place/office/runs/cut") records"
wait "$follows" || fails "the run with a cut"
saw office cut.txt 20
cut=$(hash_of "$place/office/runs/cut")
echo "shared tensors, SHA-256: with a cut $cut"
[ "$one" = "$cut" ] && [ "$one" = "$other" ] && echo "the same bits three times" || fails "other bits"
grep -o '"\(missing\|late\)": \[[^]]\+\]' "$place/office/runs/cut/rounds.jsonl" | sort | uniq -c

title "11. Ctrl-C at the office; the server is ended and started again; resume"
long=$((rounds * 4))
background office stop.txt "fedvlm run fedot rounds=$long seed=7 federation=walk/admin.zip out=runs/left"
until_true 300 "played '$place/office/runs/left' 3"
kill -INT "$last"
wait "$last"
echo "exit code $?"
saw office stop.txt 6
at office "fedvlm federation status walk/admin.zip"
kill -TERM "$serves" && wait "$serves"
saw server serve.txt 1
echo "the server has played $(($(rows "$place"/server/$home/server/runs/*-s7-*) - 1)) of $long rounds"
background server serve.txt "fedvlm serve server.zip"
serves=$last
at office "fedvlm resume runs/left" || fails resume
as office "fedvlm run fedot rounds=$long seed=7 data=$place/reference engine=serial out=runs/serial-left" >"$place/office/serial.txt" 2>&1
one=$(hash_of "$place/office/runs/left") other=$(hash_of "$place/office/runs/serial-left")
echo "shared tensors, SHA-256: resumed $one"
echo "                     one process $other"
[ "$one" = "$other" ] && echo "the same bits" || fails "other bits after resume"

title "12. A further hospital, which is scored and not trained on"
at office "fedvlm federation add west in=walk" || fails add
install -m 600 "$place/office/walk/west.zip" "$place/west/west.zip"
background west join.txt "fedvlm join west.zip data=images rules=site.yaml"
joined[west]=$last
until_true 180 "grep -q 'has joined' '$place/west/join.txt'" && saw west join.txt
at office "fedvlm run fedot rounds=5 unseen=west federation=walk/admin.zip out=runs/unseen" || fails "the run with an unseen site"
at west "fedvlm ledger" | cut -c 1-160

title "13. Secure aggregation, and what is refused"
at office "fedvlm run fedavg secure=true rounds=3 federation=walk/admin.zip out=runs/secure"
at office "fedvlm run fedprox rounds=3 federation=walk/admin.zip out=runs/refused"
at north "fedvlm join server.zip data=images"
at north "fedvlm join north.zip data=images"

title "14. The end"
for who in north south west; do kill -TERM "${joined[$who]}" && wait "${joined[$who]}"; saw $who join.txt 1; done
at office "timeout 60 fedvlm run fedavg rounds=3 federation=walk/admin.zip out=runs/nobody"
echo "exit code $?"
kill -TERM "$serves" && wait "$serves"
saw server serve.txt 1
at office "fedvlm federation status walk/admin.zip"
du -sh "$place"/{server,office,north,south}/ | sed "s|$place||"
exit $failed
