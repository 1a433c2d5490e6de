// npm's `openai`: finds the model by OPENAI_BASE_URL and OPENAI_API_KEY.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const tools = [{
  type: "function",
  function: {
    name: "lookup",
    parameters: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
  },
}];
const isStreamed = process.env.REINFORGE_EXAMPLE_ID.endsWith("streamed");
const client = new OpenAI();
const messages = [{ role: "user", content: readFileSync(0, "utf8") }];
const ask = async () => isStreamed
  ? await client.chat.completions.stream({ model: "agent", messages, tools }).finalMessage()
  : (await client.chat.completions.create({ model: "agent", messages, tools })).choices[0].message;

let message;
while ((message = await ask()).tool_calls?.length) {
  messages.push(message);
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: "It costs 24 coins." });
  }
}
console.log(message.content);
