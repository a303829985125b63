#!/bin/sh
# Decoding with guesses of the next layer's experts and without, on a disk that is simulated, settings in turns.
# Usage: bench/lookahead.sh MODEL IDS DISK [OPTIONS OF sakia bench ...]
# DISK is what --simulate-disk takes, or "real". Fit first: sakia fit-lookahead -m MODEL ...
# Prints one line a run: setting, tok/s, MB a token, waiting, agreement, wasted MB.
set -eu
model=$1 ids=$2 disk=$3
shift 3
sakia=${SAKIA:-target/release/sakia}
turns=${TURNS:-5}
if [ "$disk" = real ]; then set -- "$@"; else set -- --simulate-disk "$disk" "$@"; fi
turn=0
while [ "$turn" -lt "$turns" ]; do
  for how in off tap fitted last-token; do
    "$sakia" bench -m "$model" --ids-file "$ids" --lookahead "$how" "$@" |
      python3 -c '
import json, sys
r = json.load(sys.stdin)
d, l = r["decode"], r.get("lookahead")
row = [sys.argv[1], "%.2f tok/s" % d["tokens_per_second"], "%.3f MB" % (d["read_bytes_per_token"] / 1e6),
       "%.0f %% waiting" % (100 * d["wait_us"] / d["elapsed_us"])]
if l:
    reads = l["reads"]
    row += ["agreement %.3f" % l["agreement"], "precision %.3f" % l["absent_precision"],
            "%d of %d tokens" % (l["tokens"], d["tokens"] + 1), "%d issued %d used %d late" % (reads["issued"], reads["used"], reads["late"]),
            "wasted %.2f of %.2f MB" % (reads["wasted_bytes"] / 1e6, (reads["wasted_bytes"] + reads["used_bytes"]) / 1e6)]
print(" | ".join(row), flush=True)' "$how"
  done
  turn=$((turn + 1))
done
