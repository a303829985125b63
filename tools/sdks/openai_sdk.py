"""The official Python client of OpenAI against a running server."""

import json
import os
import time

import openai
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["SAKIA_URL"] + "/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                   "required": ["city"], "additionalProperties": False}}}]


def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    more.setdefault("max_tokens", 48)
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more)


def test_conversation():
    first = ask("What is a compiler?")
    assert first.choices[0].message.content and first.usage.completion_tokens > 0, first
    again = ask("What is a compiler?")
    assert again.choices[0].message.content == first.choices[0].message.content
    messages = [{"role": "user", "content": "What is a compiler?"},
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "user", "content": "And a linker?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_stream_equals_whole():
    whole = ask("Name a colour.").choices[0].message.content
    stream = ask("Name a colour.", stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    assert text == whole, (text, whole)
    assert usage.completion_tokens > 0


def test_tools():
    answer = ask("What is the weather in Rome?", tools=TOOLS, tool_choice="required",
                 parallel_tool_calls=False, max_tokens=96)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}, choice.message,
                {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    after = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=32)
    assert after.choices[0].message.role == "assistant"
    with client.chat.completions.stream(model=MODEL, messages=messages[:1], tools=TOOLS, temperature=0,
                                        tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_structured():
    class City(BaseModel):
        name: str
        large: bool

    schema = City.model_json_schema() | {"additionalProperties": False}
    schema["properties"]["name"]["maxLength"] = 12
    answer = ask("Describe Rome as JSON.", max_tokens=96, response_format={
        "type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}})
    City.model_validate_json(answer.choices[0].message.content)


def test_logprobs():
    answer = ask("Hi", logprobs=True, top_logprobs=3, max_tokens=4)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) >= 1 and all(t.logprob <= 0 and len(t.top_logprobs) == 3 for t in tokens)
    # The likeliest token is the one that temperature 0 takes.
    assert all(t.token == t.top_logprobs[0].token for t in tokens)


def test_several_and_seed():
    make = lambda seed: client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me something."}], n=2, seed=seed,
        temperature=1.0, max_tokens=12)
    first, again = make(7), make(7)
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]


def test_completion_and_responses():
    text = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert text.choices[0].text
    response = client.responses.create(model=MODEL, input="What is a compiler?", max_output_tokens=16)
    assert response.output_text and response.usage.output_tokens > 0
    with client.responses.stream(model=MODEL, input="What is a compiler?", max_output_tokens=200) as stream:
        deltas = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text


def test_errors():
    for call, kind in [
        (lambda: ask("Hi", n=0), openai.BadRequestError),
        (lambda: client.chat.completions.create(model="gone", messages=[{"role": "user", "content": "x"}]),
         openai.NotFoundError),
        (lambda: ask("word " * 20000), openai.BadRequestError),
    ]:
        try:
            call()
        except kind as error:
            assert error.message
        else:
            raise AssertionError(kind)


def test_cancellation():
    before = metric("sakia_jobs_cancelled_total")
    stream = ask("Tell me a very long story.", stream=True, max_tokens=600)
    next(iter(stream))
    stream.close()
    for _ in range(100):
        if metric("sakia_jobs_cancelled_total") > before or metric("sakia_jobs_running") == 0:
            return
        time.sleep(0.05)
    raise AssertionError("it was not cancelled")


def metric(name):
    import urllib.request
    text = urllib.request.urlopen(os.environ["SAKIA_URL"] + "/metrics").read().decode()
    return next((int(l.split()[-1]) for l in text.splitlines() if l.startswith(name + " ")), 0)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name, flush=True)
