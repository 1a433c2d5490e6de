"use strict";
// Text of the model reaches the page through `textContent` alone.

const find = (id) => document.getElementById(id);
const BASE = "@0";
const sides = ["model", "other"].map((id) => ({ select: find(id), messages: [], before: [] }));
let last = null;
let running = null;
let examples = [];

function say(text) {
  find("status").textContent = text;
}

async function fetchData(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  return body.data;
}

async function listModels() {
  try {
    const names = (await fetchData("/v1/models")).map((model) => model.id);
    for (const side of sides) side.select.append(...names.map((name) => new Option(name, name)));
    const base = names.find((name) => name.endsWith(BASE) && names.includes(name.slice(0, -BASE.length)));
    if (base) {
      find("model").value = base.slice(0, -BASE.length);
      find("other").value = base;
      await listExamples();
    }
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`);
  }
}

async function listExamples() {
  const name = find("model").value.replace(/@\d+$/, "");
  examples = await fetchData(`/chat/examples?model=${encodeURIComponent(name)}`).catch(() => []);
  find("example").hidden = examples.length === 0;
}

function show(parent, role, name, text) {
  const article = document.createElement("article");
  article.className = role;
  const title = document.createElement("h2");
  title.textContent = name;
  const body = document.createElement("p");
  body.textContent = text;
  article.append(title, body);
  parent.append(article);
  return { article, body };
}

function showQuestion(text) {
  show(find("log"), "user", "You", text);
  const replies = document.createElement("div");
  replies.className = "replies";
  find("log").append(replies);
  replies.scrollIntoView({ block: "end" });
  return replies;
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

async function rate(id, button) {
  const body = JSON.stringify({ id, thumb: button.value, source: "chat page" });
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body };
    const response = await fetch("/v1/feedback", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for (const each of button.parentElement.children) each.setAttribute("aria-pressed", String(each === button));
  } catch (error) {
    say(`The reply cannot be rated: ${error.message}`);
  }
}

function addThumbs(article, id) {
  const thumbs = document.createElement("div");
  thumbs.className = "thumbs";
  for (const [value, text] of [["up", "👍 Good"], ["down", "👎 Bad"]]) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", value, textContent: text });
    button.addEventListener("click", () => rate(id, button));
    thumbs.append(button);
  }
  article.append(thumbs);
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

async function ask(side, asked, replies) {
  const { messages } = side; // a new conversation has another list
  const model = side.select.value;
  const asTokens = find("tokens").checked;
  const system = find("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, asked],
    temperature: Number(find("temperature").value),
    max_tokens: Number(find("max_tokens").value),
    stream: true,
    ...(asTokens ? { logprobs: true, top_logprobs: 5 } : {}),
  };
  const shown = show(replies, "assistant", model.endsWith(BASE) ? `${model} (base model)` : model, "");
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  let reply = "";
  let id = null;
  try {
    const response = await fetch("/v1/chat/completions", { ...options, signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      for (const choice of event.choices) reply += addDelta(shown, choice, asTokens);
    }
    if (id && "feedback" in document.body.dataset) addThumbs(shown.article, id);
  } finally {
    if (reply) messages.push(asked, { role: "assistant", content: reply });
    else if (!shown.reasoning) shown.article.remove();
    replies.scrollIntoView({ block: "end" });
  }
}

async function answer() {
  say("");
  running = new AbortController();
  for (const id of ["send", "again", "example"]) find(id).disabled = true;
  find("stop").disabled = false;
  const asking = sides.filter((side) => side.select.value).map((side) => ask(side, last.asked, last.replies));
  const failed = (await Promise.allSettled(asking)).map((each) => each.reason).filter(Boolean);
  say(failed.filter((error) => error.name !== "AbortError").map((error) => error.message).join("; "));
  running = null;
  for (const id of ["send", "again", "example"]) find(id).disabled = id === "again" && !last;
  find("stop").disabled = true;
  find("text").focus();
}

function clear() {
  running?.abort();
  last = null;
  for (const side of sides) side.messages = [];
  find("log").replaceChildren();
  find("again").disabled = true;
  say("");
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value;
  if (!text.trim() || running) return;
  for (const side of sides) side.before = [...side.messages];
  last = { asked: { role: "user", content: text }, replies: showQuestion(text) };
  find("text").value = "";
  answer();
});

find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("form").requestSubmit();
  }
});

find("again").addEventListener("click", () => {
  if (!last || running) return;
  for (const side of sides) side.messages = [...side.before];
  last.replies.replaceChildren();
  answer();
});

find("example").addEventListener("click", () => {
  clear();
  const messages = [...examples[Math.floor(Math.random() * examples.length)].messages];
  find("system").value = messages[0].role === "system" ? messages.shift().content : "";
  find("text").value = messages.pop().content;
  for (const side of sides) side.messages = [...messages];
  for (const each of messages) show(find("log"), each.role, each.role === "user" ? "You" : "Example", each.content);
  find("text").focus();
});

find("model").addEventListener("change", listExamples);
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", clear);

listModels();
