"""Many clients for a while: hang-ups, long prompts, bad JSON. Memory and file descriptors have to stay flat, and every
whole answer has to be that of its own prompt.

    python soak.py SECONDS CLIENTS   with SAKIA_URL and SAKIA_PID
"""

import http.client
import json
import os
import random
import sys
import threading
import time
from urllib.parse import urlparse

SECONDS, CLIENTS = float(sys.argv[1]), int(sys.argv[2])
SERVER, PID = urlparse(os.environ["SAKIA_URL"]), os.environ.get("SAKIA_PID")
QUESTIONS = ["What is a compiler?", "What is the capital of France?", "Name a colour.", "What is a whale?"]
END = time.monotonic() + SECONDS
lock = threading.Lock()
counts, gaps, wrong, golden = {}, [], [], {}


def post(body, path="/v1/chat/completions"):
    connection = http.client.HTTPConnection(SERVER.hostname, SERVER.port, timeout=600)
    connection.request("POST", path, body, {"content-type": "application/json"})
    return connection, connection.getresponse()


def chat(question, **more):
    messages = [{"role": "user", "content": question}]
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 24} | more)


def count(name):
    with lock:
        counts[name] = counts.get(name, 0) + 1


def whole():
    question = random.choice(QUESTIONS)
    connection, response = post(chat(question))
    body = json.loads(response.read())
    connection.close()
    count(f"whole {response.status}")
    if response.status == 200:
        text = body["choices"][0]["message"]["content"]
        with lock:
            if golden.setdefault(question, text) != text:
                wrong.append((question, golden[question], text))


def stream(hang_up):
    connection, response = post(chat(random.choice(QUESTIONS), stream=True))
    stop, seen, last = random.randrange(1, 12), 0, None
    for line in response:
        if line.startswith(b"data: ") and b'"content"' in line and b'"role"' not in line:
            now = time.monotonic()
            if last is not None:
                with lock:
                    gaps.append(now - last)
            last, seen = now, seen + 1
        if hang_up and seen >= stop:
            break
    response.close()
    connection.close()
    count(f"{'hung up' if hang_up else 'stream'} {response.status}")


def long_prompt():
    connection, response = post(chat("word " * random.randrange(50, 700), max_tokens=2, stream=True))
    if random.random() < 0.5:
        response.read(1)
    else:
        response.read()
    response.close()
    connection.close()
    count(f"long {response.status}")


def bad():
    body = random.choice(["{", "[" * 500, "null", '{"messages": 5}', chat("x", n=0), "\x00"])
    connection, response = post(body)
    response.read()
    connection.close()
    count(f"bad {response.status}")


def client():
    while time.monotonic() < END:
        try:
            action = random.random()
            if action < 0.35:
                whole()
            elif action < 0.55:
                stream(False)
            elif action < 0.8:
                stream(True)
            elif action < 0.9:
                long_prompt()
            else:
                bad()
        except Exception as error:
            count(type(error).__name__)
        time.sleep(random.random() * 0.05)


def usage():
    status = open(f"/proc/{PID}/status").read()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return rss / 1024, len(os.listdir(f"/proc/{PID}/fd"))


threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
for thread in threads:
    thread.start()
samples = []
while any(thread.is_alive() for thread in threads):
    time.sleep(1)
    if PID:
        samples.append(usage())
time.sleep(2)
print("requests", dict(sorted(counts.items())))
if gaps:
    gaps.sort()
    at = lambda share: gaps[min(len(gaps) - 1, int(len(gaps) * share))] * 1000
    print(f"between tokens: p50 {at(0.5):.0f} ms, p99 {at(0.99):.0f} ms, worst {gaps[-1] * 1000:.0f} ms")
assert not wrong, wrong[:3]
assert not any(name.split()[-1] == "500" for name in counts), counts
if samples:
    half = samples[len(samples) // 2:]
    early, late = max(s[0] for s in samples[:len(samples) // 2 or 1]), max(s[0] for s in half)
    end = usage()
    print(f"RSS: {early:.1f} MiB in the first half, {late:.1f} in the second; descriptors at most "
          f"{max(s[1] for s in samples)}, {end[1]} at the end")
    assert late <= early * 1.05 + 2, "memory grows"
    assert end[1] <= 48, "descriptors leak"
