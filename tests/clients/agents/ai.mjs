// Vercel's `ai` over an OpenAI-compatible provider.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, REINFORGE_EXAMPLE_ID: way } = process.env;
const request = {
  model: createOpenAICompatible({ name: "reinforge", baseURL, apiKey })("agent"),
  prompt: readFileSync(0, "utf8"),
  tools: {
    lookup: tool({
      description: "Returns the price of an article.",
      inputSchema: z.object({ item: z.string() }),
      execute: async () => "It costs 24 coins.",
    }),
  },
  stopWhen: stepCountIs(3),
};
const result = way.endsWith("streamed") ? streamText(request) : await generateText(request);
console.log(await result.text);
