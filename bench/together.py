#!/usr/bin/env python3
"""Different prompts at once, and one after the other, on one running server: throughput, bytes, and whether the answers are
the same.

    sakia serve -m MODEL --only --sequences 4 --memory 8GiB --context 1024 --port 8484
    together.py http://127.0.0.1:8484 --rounds 3 --tokens 32 -o receipt.json

A round is both, in turn; the first one warms the pool up and does not count. Medians are printed as JSON.
"""

import argparse
import concurrent.futures
import json
import statistics
import sys
import time
import urllib.request

PROMPTS = [
    "The water wheel lifts a fixed number of buckets out of a deep well. When the river is low, the miller",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n",
    "Dear Sir, I have the honour to inform you that the ship which left the harbour on the third of May",
    "1. Mix the flour with water and salt. 2. Let the dough rest for an hour. 3. Heat the oven to 230 degrees. 4.",
]


def get(url):
    with urllib.request.urlopen(url, timeout=600) as answer:
        return answer.read().decode()


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)


def counters(base):
    lines = (line.split() for line in get(f"{base}/metrics").splitlines())
    return {line[0]: float(line[1]) for line in lines if len(line) == 2 and line[0] != "#"}


def answer(base, model, prompt, tokens):
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
    result = post(f"{base}/v1/completions", body)
    choice = result["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], result["usage"]["completion_tokens"]


def measure(base, act):
    before, began = counters(base), time.monotonic()
    answers = act()
    seconds, after = time.monotonic() - began, counters(base)

    def counted(name):
        return after[f"sakia_{name}"] - before[f"sakia_{name}"]

    tokens = sum(tokens for _, _, tokens in answers)
    passes = counted("decode_passes_total")
    return [(text, chances) for text, chances, _ in answers], {
        "seconds": round(seconds, 3),
        "tokens_per_second": tokens / seconds,
        "read_bytes_per_token": counted("expert_read_bytes_total") / tokens,
        "decode_passes": passes,
        "tokens": tokens,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("-o", "--out")
    args = parser.parse_args()
    base = args.url.rstrip("/")
    model = json.loads(get(f"{base}/v1/models"))["data"][0]["id"]
    pool = concurrent.futures.ThreadPoolExecutor(len(PROMPTS))

    def one(prompt):
        return answer(base, model, prompt, args.tokens)

    # The model is loaded when it is first asked for, and has no counters before.
    answer(base, model, PROMPTS[0], 1)
    runs = {"apart": [], "together": []}
    expected = None
    for round_number in range(args.rounds + 1):
        for name, act in [
            ("apart", lambda: [one(prompt) for prompt in PROMPTS]),
            ("together", lambda: list(pool.map(one, PROMPTS))),
        ]:
            answers, numbers = measure(base, act)
            expected = expected or answers
            if answers != expected:
                sys.exit(f"round {round_number}, {name}: the answers differ from those of the first round")
            if round_number > 0:
                runs[name].append(numbers)
            print(name, json.dumps(numbers), file=sys.stderr)

    def median(name, what):
        return statistics.median(run[what] for run in runs[name])

    result = {
        "model": model,
        "prompts": len(PROMPTS),
        "answers_equal": True,
        "ratio_of_tokens_per_second": median("together", "tokens_per_second")
        / median("apart", "tokens_per_second"),
        "medians": {
            name: {what: median(name, what) for what in ("tokens_per_second", "read_bytes_per_token")}
            for name in runs
        },
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
