// Vercel's AI SDK with its OpenAI-compatible provider against a running server.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const base = process.env.SAKIA_URL;
const id = (await (await fetch(`${base}/v1/models`)).json()).data[0].id;
const provider = createOpenAICompatible({ name: "sakia", baseURL: `${base}/v1`, includeUsage: true });
const common = { model: provider(id), temperature: 0, maxOutputTokens: 64, maxRetries: 0 };

const tests = {
  async streamEqualsWhole() {
    const { text, usage } = await generateText({ ...common, prompt: "What is a compiler?" });
    const stream = streamText({ ...common, prompt: "What is a compiler?" });
    let streamed = "";
    for await (const part of stream.textStream) streamed += part;
    assert.equal(streamed, text);
    assert.ok(usage.outputTokens > 0);
  },
  async tools() {
    let called = 0;
    const now = tool({
      description: "Tells the time",
      inputSchema: jsonSchema({ type: "object", properties: {}, additionalProperties: false }),
      execute: async () => { called += 1; return "Noon."; },
    });
    await generateText({ ...common, prompt: "What time is it?", tools: { now }, toolChoice: "required", stopWhen: stepCountIs(1) });
    assert.ok(called >= 1);
  },
  async errors() {
    const broken = generateText({ ...common, model: provider("gone"), prompt: "x" });
    await assert.rejects(broken, (error) => error.statusCode === 404);
  },
  async cancellation() {
    const controller = new AbortController();
    const stream = streamText({ ...common, prompt: "Tell me a long story.", maxOutputTokens: 600, abortSignal: controller.signal, onError() {} });
    for await (const _ of stream.textStream) { controller.abort(); break; }
    const { text } = await generateText({ ...common, prompt: "Hi", maxOutputTokens: 4 });
    assert.equal(typeof text, "string");
  },
};
for (const [name, test] of Object.entries(tests)) {
  await test();
  console.log("ok", name);
}
