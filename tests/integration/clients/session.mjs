// A session through OpenAI's own JavaScript library: an answer with tools, a stream, three choices. Prints what it got.
import OpenAI from "openai";

const [baseURL, apiKey, model, session] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, defaultHeaders: { "X-Session-Id": session } });
const tools = JSON.parse(process.env.TOOLS);
const messages = [
  { role: "system", content: "You are a coding agent." },
  { role: "user", content: "Write `fizzbuzz(n)` in solution.py." },
];

const first = await client.chat.completions.create({ model, messages, tools, max_tokens: 300 });
const answer = first.choices[0].message;
messages.push(answer);
for (const call of answer.tool_calls ?? []) {
  messages.push({ role: "tool", tool_call_id: call.id, content: "wrote 4 lines to solution.py" });
}
messages.push({ role: "user", content: "It fails for 15." });

let text = "";
let chunks = 0;
const calls = [];
for await (const chunk of await client.chat.completions.create({ model, messages, tools, max_tokens: 300, stream: true })) {
  chunks += 1;
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    calls.push(...(choice.delta.tool_calls ?? []));
  }
}
messages.push({ role: "assistant", content: text, ...(calls.length ? { tool_calls: calls } : {}) });
for (const call of calls) {
  messages.push({ role: "tool", tool_call_id: call.id, content: "ok" });
}
messages.push({ role: "user", content: "And now?" });

const last = await client.chat.completions.create({ model, messages, tools, n: 3, max_tokens: 40 });
const models = [];
for await (const one of client.models.list()) {
  models.push(one.id);
}
console.log(JSON.stringify({ chunks, choices: last.choices.length, models }));
