// LangChain.js: its agent over the chat model of `@langchain/openai`, which reads the environment.
import { readFileSync } from "node:fs";
import { createAgent, tool } from "langchain";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const lookup = tool(({ item }) => `The ${item} costs 24 coins.`, {
  name: "lookup",
  description: "Returns the price of an article.",
  schema: z.object({ item: z.string() }),
});
const agent = createAgent({ model: new ChatOpenAI({ model: "gpt-4o" }), tools: [lookup] });
const question = { messages: [{ role: "user", content: readFileSync(0, "utf8") }] };

let state;
if (process.env.REINFORGE_EXAMPLE_ID.endsWith("streamed")) {
  for await (const [mode, part] of await agent.stream(question, { streamMode: ["messages", "values"] })) {
    if (mode === "values") state = part;
  }
} else {
  state = await agent.invoke(question);
}
console.log(state.messages.at(-1).text);
