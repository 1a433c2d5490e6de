// Mastra: an agent whose model its router knows as OpenAI's.
import { readFileSync } from "node:fs";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const lookup = createTool({
  id: "lookup",
  description: "Returns the price of an article.",
  inputSchema: z.object({ item: z.string() }),
  execute: async ({ item }) => `The ${item} costs 24 coins.`,
});
const agent = new Agent({
  id: "clerk",
  name: "clerk",
  instructions: "You are a clerk.",
  model: "openai/gpt-4o",
  tools: { lookup },
});
const question = readFileSync(0, "utf8");
const result = process.env.REINFORGE_EXAMPLE_ID.endsWith("streamed")
  ? await agent.stream(question)
  : await agent.generate(question);
console.log(await result.text);
