// The clerk as a Node program: npm's `openai` finds the model by OPENAI_BASE_URL and OPENAI_API_KEY, and nothing changes.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const PRICES = {
  lamp: 24, chair: 35, table: 89, clock: 17, kettle: 32, basket: 12, mirror: 46, blanket: 28,
  candle: 5, vase: 19, shelf: 63, stool: 21, curtain: 38, pillow: 14, teapot: 27, ladder: 54,
};
const FUNCTIONS = {
  lookup: ({ item }) => PRICES[item] ?? "no such article",
  calculate: ({ expression }) => {
    const [, left, operator, right] = expression.match(/^(\d{1,4})([-+*])(\d{1,4})$/) ?? [];
    return { "+": +left + +right, "-": left - right, "*": left * right }[operator] ?? "not an expression";
  },
};
const describe = (name, parameter) => ({
  type: "function",
  function: { name, parameters: { type: "object", properties: { [parameter]: { type: "string" } }, required: [parameter] } },
});

const client = new OpenAI();
const messages = [
  { role: "system", content: "You are a clerk. Look prices up, calculate, then answer with the number only." },
  { role: "user", content: readFileSync(0, "utf8") },
];
const tools = [describe("lookup", "item"), describe("calculate", "expression")];
for (let turn = 0; turn < 4; turn++) {
  const reply = await client.chat.completions.create({ model: "clerk", messages, tools, max_tokens: 40 });
  const { message } = reply.choices[0];
  messages.push(message);
  if (!message.tool_calls) { console.log(message.content); break; }
  for (const { id, function: { name, arguments: given } } of message.tool_calls) {
    let content;
    try { content = String(FUNCTIONS[name](JSON.parse(given))); } catch (error) { content = `error: ${error.message}`; }
    messages.push({ role: "tool", tool_call_id: id, content });
  }
}
