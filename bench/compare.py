#!/usr/bin/env python3
"""Two commands in turn, and the ratio of what they measure.

    compare.py -n 5 --cold MODEL -o receipt.json \\
        --a 'sakia bench -m MODEL ...' --b 'llama_forced -m MODEL ...' \\
        prefill.tokens_per_second decode.tokens_per_second

Both print one JSON object on stdout. Runs alternate (a b, b a, a b, ...), so that drift of a shared machine meets
both alike; medians and their ratio a / b are printed and written, with every single run. --cold drops the named
files from the page cache before each run. A run that fails ends the comparison.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time


def drop_from_cache(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def files_of(path):
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def run(command, cold):
    for path in cold:
        for file in files_of(path):
            drop_from_cache(file)
    load = os.getloadavg()[0]
    began = time.monotonic()
    process = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    wall = time.monotonic() - began
    if process.returncode != 0:
        sys.exit(f"exit {process.returncode}: {command}")
    result = json.loads(process.stdout)
    return {"load_before": load, "wall_s": round(wall, 3), "result": result}


def value(run, path):
    if path == "wall_s":
        return run[path]
    found = run["result"]
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            sys.exit(f"no `{path}` in what the command printed")
        found = found[name]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, metavar="COMMAND")
    parser.add_argument("--b", required=True, metavar="COMMAND")
    parser.add_argument("-n", type=int, default=5, help="runs of each [default: 5]")
    parser.add_argument("--cold", action="append", default=[], metavar="PATH")
    parser.add_argument("-o", metavar="RECEIPT", help="where all runs are written")
    parser.add_argument("metrics", nargs="+", metavar="METRIC", help="path in the JSON, or wall_s")
    args = parser.parse_args()
    if args.n < 1:
        parser.error("-n needs at least 1 run")

    runs = {"a": [], "b": []}
    for i in range(args.n):
        for which in ("ab", "ba")[i % 2]:
            runs[which].append(run(getattr(args, which), args.cold))
            values = ", ".join(f"{m} {value(runs[which][-1], m):.4g}" for m in args.metrics)
            print(f"{which} {i + 1}/{args.n}: {values}", file=sys.stderr, flush=True)

    medians = {}
    for metric in args.metrics:
        a, b = (statistics.median(value(run, metric) for run in runs[which]) for which in "ab")
        medians[metric] = {"a": a, "b": b, "ratio": a / b if b else None}
        ratio = f"{a / b:.3f}" if b else "-"
        print(f"{metric:32} a {a:12.4f}   b {b:12.4f}   a/b {ratio}")
    if args.o:
        receipt = {"a": args.a, "b": args.b, "medians": medians, "runs": runs}
        with open(args.o, "x") as file:
            json.dump(receipt, file, indent=1)
            file.write("\n")


main()
