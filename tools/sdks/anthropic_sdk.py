"""The official Python client of Anthropic against a running server."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SAKIA_URL"], api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
TOOLS = [{"name": "get_weather", "description": "Tells the weather of a city", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"], "additionalProperties": False}}]


def ask(messages, **more):
    more.setdefault("max_tokens", 48)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    # Some clients no longer have it as an argument.
    return client.messages.create(model=MODEL, messages=messages, extra_body={"temperature": 0}, **more)


def test_conversation():
    first = ask("What is a compiler?", system="You are helpful.")
    text = first.content[0].text
    assert text and first.usage.output_tokens > 0
    second = ask([{"role": "user", "content": "What is a compiler?"},
                  {"role": "assistant", "content": first.content},
                  {"role": "user", "content": "And a linker?"}])
    assert second.role == "assistant"


def test_stream_equals_whole():
    whole = ask("Name a colour.").content[0].text
    with client.messages.stream(model=MODEL, max_tokens=48, extra_body={"temperature": 0},
                                messages=[{"role": "user", "content": "Name a colour."}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text
    assert final.usage.output_tokens > 0 and final.stop_reason


def test_tools():
    question = {"role": "user", "content": "What is the weather in Rome?"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = ask([question], tools=TOOLS, tool_choice=choice, max_tokens=96)
    assert answer.stop_reason == "tool_use", answer
    use = next(block for block in answer.content if block.type == "tool_use")
    assert use.name == "get_weather" and "city" in use.input
    after = ask([question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."}]}], tools=TOOLS)
    assert after.type == "message"
    with client.messages.stream(model=MODEL, max_tokens=96, messages=[question], tools=TOOLS,
                                tool_choice=choice, extra_body={"temperature": 0}) as stream:
        final = stream.get_final_message()
    assert next(block for block in final.content if block.type == "tool_use").input == use.input


def test_count():
    messages = [{"role": "user", "content": "What is a compiler?"}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    usage = ask(messages, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors():
    for call, kind in [
        (lambda: ask([]), anthropic.BadRequestError),
        (lambda: client.messages.create(model="gone", max_tokens=1,
                                        messages=[{"role": "user", "content": "x"}]), anthropic.NotFoundError),
    ]:
        try:
            call()
        except kind as error:
            assert error.body["type"] == "error"
        else:
            raise AssertionError(kind)


def test_cancellation():
    with client.messages.stream(model=MODEL, max_tokens=600,
                                messages=[{"role": "user", "content": "Tell me a long story."}]) as stream:
        next(iter(stream.text_stream))
    assert ask("Hi", max_tokens=1).type == "message"


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name, flush=True)
