"""The official Python client of Ollama against a running server."""

import json
import os

import ollama

client = ollama.Client(host=os.environ["SAKIA_URL"])
MODEL = client.list().models[0].model
OPTIONS = {"temperature": 0, "num_predict": 48}


def ask(text, **more):
    more.setdefault("options", OPTIONS)
    return client.chat(model=MODEL, messages=[{"role": "user", "content": text}], **more)


def test_conversation():
    answer = ask("What is a compiler?")
    assert answer.message.content and answer.done and answer.eval_count > 0
    stream = ask("What is a compiler?", stream=True)
    assert "".join(part.message.content or "" for part in stream) == answer.message.content


def test_generate():
    whole = client.generate(model=MODEL, prompt="Name a colour.", options=OPTIONS)
    stream = client.generate(model=MODEL, prompt="Name a colour.", options=OPTIONS, stream=True)
    assert whole.response and "".join(part.response for part in stream) == whole.response


def test_tools():
    def get_weather(city: str) -> str:
        """Tells the weather of a city.

        Args:
          city: The city
        """
        return "It is sunny."

    first = ask("What is the weather in Rome?", tools=[get_weather])
    messages = [{"role": "user", "content": "What is the weather in Rome?"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather",
                                                                   "arguments": {"city": "Rome"}}}]},
                {"role": "tool", "tool_name": "get_weather", "content": get_weather("Rome")}]
    answer = client.chat(model=MODEL, messages=messages, tools=[get_weather], options=OPTIONS)
    assert first.message.role == answer.message.role == "assistant"


def test_structured():
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}},
              "required": ["name"], "additionalProperties": False}
    answer = ask("Describe Rome as JSON.", format=schema, options={"temperature": 0, "num_predict": 96})
    assert list(json.loads(answer.message.content)) == ["name"]


def test_models():
    assert "completion" in client.show(MODEL).capabilities
    assert client.ps().models[0].model == MODEL


def test_errors():
    for call in [lambda: client.chat(model="gone", messages=[{"role": "user", "content": "x"}]),
                 lambda: ask("x", options={"mirostat": 1})]:
        try:
            call()
        except ollama.ResponseError as error:
            assert error.error and error.status_code in (400, 404)
        else:
            raise AssertionError("it was accepted")


def test_cancellation():
    stream = ask("Tell me a very long story.", stream=True, options={"num_predict": 600})
    next(stream)
    stream.close()
    assert ask("Hi", options={"num_predict": 1}).done


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name, flush=True)
