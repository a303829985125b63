// The official Node client of OpenAI against a running server.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SAKIA_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const user = (content) => [{ role: "user", content }];
const ask = (content, more = {}) =>
  client.chat.completions.create({ model, messages: user(content), temperature: 0, max_tokens: 48, ...more });

const tests = {
  async streamEqualsWhole() {
    const whole = (await ask("What is a compiler?")).choices[0].message.content;
    let text = "";
    for await (const chunk of await ask("What is a compiler?", { stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole);
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "now", parameters: { type: "object", properties: {}, additionalProperties: false } } }];
    const answer = await ask("What time is it?", { tools, tool_choice: "required", parallel_tool_calls: false });
    const message = answer.choices[0].message;
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), {});
    const messages = [...user("What time is it?"), message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Noon." }];
    await client.chat.completions.create({ model, messages, tools, max_tokens: 16 });
  },
  async structured() {
    const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
    const answer = await ask("Is water wet?", { response_format: { type: "json_schema", json_schema: { name: "x", schema, strict: true } } });
    assert.equal(typeof JSON.parse(answer.choices[0].message.content).ok, "boolean");
  },
  async responses() {
    let deltas = "";
    let final;
    for await (const event of await client.responses.create({ model, input: "Hi", max_output_tokens: 12, stream: true })) {
      if (event.type === "response.output_text.delta") deltas += event.delta;
      if (event.type === "response.completed" || event.type === "response.incomplete") final = event.response;
    }
    assert.equal(deltas, final.output.filter((item) => item.type === "message").map((item) => item.content[0].text).join(""));
  },
  async errors() {
    await assert.rejects(ask("x", { n: 0 }), (error) => error.status === 400 && error.param === "n");
  },
  async cancellation() {
    const stream = await ask("Tell me a very long story.", { stream: true, max_tokens: 600 });
    for await (const _ of stream) break;
    assert.ok((await ask("Hi", { max_tokens: 1 })).id);
  },
};
for (const [name, test] of Object.entries(tests)) {
  await test();
  console.log("ok", name);
}
