"use strict";
// Text of the model reaches the page through `textContent` alone.

const find = (id) => document.getElementById(id);
const messages = [];
let running = null;

function say(text) {
  find("status").textContent = text;
}

async function listModels() {
  try {
    const response = await fetch("/v1/models");
    const body = await response.json();
    if (!response.ok) throw new Error(body.error.message);
    for (const model of body.data) {
      const option = document.createElement("option");
      option.value = option.textContent = model.id;
      find("model").append(option);
    }
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`);
  }
}

function show(role, text) {
  const article = document.createElement("article");
  article.className = role;
  const title = document.createElement("h2");
  title.textContent = role === "user" ? "You" : find("model").value;
  const body = document.createElement("p");
  body.textContent = text;
  article.append(title, body);
  find("log").append(article);
  article.scrollIntoView({ block: "end" });
  return { article, body };
}

function classify(logprob) {
  if (logprob > Math.log(0.8)) return "likely";
  return logprob > Math.log(0.3) ? "unsure" : "unlikely";
}

function addTokens(body, content) {
  for (const token of content) {
    const span = document.createElement("span");
    span.className = `token ${classify(token.logprob)}`;
    span.textContent = token.token;
    const others = token.top_logprobs.map((each) => `${JSON.stringify(each.token)} ${Math.exp(each.logprob).toFixed(3)}`);
    span.title = [`p = ${Math.exp(token.logprob).toFixed(3)}`, ...others].join("\n");
    body.append(span);
  }
}

function addDelta(shown, choice, asTokens) {
  const delta = choice.delta;
  if (delta.reasoning_content) {
    if (!shown.reasoning) {
      shown.reasoning = document.createElement("p");
      shown.reasoning.className = "reasoning";
      shown.body.before(shown.reasoning);
    }
    shown.reasoning.append(delta.reasoning_content);
  }
  if (asTokens && choice.logprobs) addTokens(shown.body, choice.logprobs.content);
  else if (delta.content) shown.body.append(delta.content);
  return delta.content || "";
}

async function* readEvents(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function send(asked) {
  const asTokens = find("tokens").checked;
  const system = find("system").value.trim();
  const body = {
    model: find("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, asked],
    temperature: Number(find("temperature").value),
    max_tokens: Number(find("max_tokens").value),
    stream: true,
    ...(asTokens ? { logprobs: true, top_logprobs: 5 } : {}),
  };
  running = new AbortController();
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch("/v1/chat/completions", { ...options, signal: running.signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const shown = show("assistant", "");
  let reply = "";
  try {
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) reply += addDelta(shown, choice, asTokens);
    }
  } finally {
    if (reply) messages.push(asked, { role: "assistant", content: reply });
  }
}

find("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = find("text").value;
  if (!text.trim() || running) return;
  say("");
  show("user", text);
  find("text").value = "";
  find("send").disabled = true;
  find("stop").disabled = false;
  try {
    await send({ role: "user", content: text });
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  } finally {
    running = null;
    find("send").disabled = false;
    find("stop").disabled = true;
    find("text").focus();
  }
});

find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("form").requestSubmit();
  }
});

find("stop").addEventListener("click", () => running?.abort());

find("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  find("log").replaceChildren();
  say("");
});

listModels();
