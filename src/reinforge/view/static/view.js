// Live pages, the table of episodes and keys. Text from runs is only ever set as textContent; pages are parsed by
// XMLHttpRequest, which runs no script, and come from elements whose text the server has escaped.
"use strict";

const main = document.getElementById("main");
const note = document.getElementById("status");
const PAGE_ROWS = 100;
const OVERSCAN = 12;
const MAX_REQUESTS = 2;
const POLL_MS = 5000;
const MAX_FAILURES = 3;
const TYPING_MS = 150;

document.documentElement.classList.add("scripted");

// ---- live pages

let isBehind = false;

function tell(text) {
  if (note && note.textContent !== text) {
    note.textContent = text;
  }
}

function explain(status) {
  return {
    401: "Not live: reinforge view was started again. Open the address that it printed.",
    404: "Not live: this has been removed.",
  }[status] || "Not live: the page cannot be read now.";
}

function refresh() {
  const request = new XMLHttpRequest();
  const address = location.href;
  request.open("GET", address);
  request.responseType = "document";
  request.onload = () => {
    if (address !== location.href) {
      return; // the filters have changed meanwhile, and their own request is on its way
    }
    const fresh = request.status === 200 && request.response ? request.response.getElementById("main") : null;
    if (fresh) {
      merge(fresh);
    } else if (request.status === 401 || request.status === 404) {
      document.dispatchEvent(new Event("gone"));
      tell(explain(request.status));
    } else {
      setTimeout(refresh, POLL_MS);
    }
  };
  request.send();
}

// Replaces the parts that differ. A part with the focus stays until the focus moves, so that no reader loses the place.
function merge(fresh) {
  main.dataset.version = fresh.dataset.version;
  isBehind = false;
  let place = main.firstElementChild;
  for (const item of fresh.children) {
    const old = findPart(item, place);
    if (!old) {
      main.insertBefore(document.importNode(item, true), place);
      continue;
    }
    while (place !== old) {
      const gone = place;
      place = place.nextElementSibling;
      gone.remove();
    }
    place = old.nextElementSibling;
    if (old.id === "rows") {
      rows.take(item);
      continue;
    }
    if ((old.source || old.outerHTML) === item.outerHTML) {
      continue;
    }
    if (old.contains(document.activeElement)) {
      isBehind = true;
    } else {
      const copy = document.importNode(item, true);
      keepChoices(old, copy);
      old.replaceWith(copy);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextElementSibling;
    gone.remove();
  }
}

function findPart(item, from) {
  for (let part = from; part; part = part.nextElementSibling) {
    if (item.id ? part.id === item.id : part.outerHTML === item.outerHTML) {
      return part;
    }
  }
  return null;
}

function keepChoices(old, copy) {
  const folded = copy.querySelectorAll("details");
  old.querySelectorAll("details").forEach((part, number) => {
    if (folded[number]) {
      folded[number].open = part.open;
    }
  });
  const boxes = new Map([...copy.querySelectorAll("input[type=checkbox]")].map((box) => [box.value, box]));
  for (const box of old.querySelectorAll("input[type=checkbox]:checked")) {
    if (boxes.has(box.value)) {
      boxes.get(box.value).checked = true;
    }
  }
}

function follow(path) {
  let source = null;
  let timer = 0;
  let failures = 0;
  let turn = 0;
  let isGone = false;

  function listen() {
    source = new EventSource(`${path}/events?version=${encodeURIComponent(main.dataset.version)}`);
    source.addEventListener("open", () => {
      failures = 0;
      tell("Live.");
    });
    source.addEventListener("change", refresh);
    source.addEventListener("error", () => {
      failures += 1;
      if (failures >= MAX_FAILURES || source.readyState === EventSource.CLOSED) {
        stop();
        poll();
      }
    });
  }

  async function poll() {
    const ownTurn = turn;
    try {
      const answer = await fetch(path);
      if (!answer.ok) {
        tell(explain(answer.status));
      } else {
        const { version } = await answer.json();
        tell("Live, every 5 seconds.");
        if (version !== main.dataset.version) {
          refresh();
        }
      }
    } catch {
      tell("Not live: no connection. Has reinforge view ended?");
    }
    if (ownTurn === turn) {
      timer = setTimeout(poll, POLL_MS);
    }
  }

  function stop() {
    turn += 1;
    clearTimeout(timer);
    if (source) {
      source.close();
      source = null;
    }
  }

  // a hidden tab keeps no connection open: browsers allow six for each host
  document.addEventListener("visibilitychange", () => {
    stop();
    failures = 0;
    if (!document.hidden && !isGone) {
      listen();
    }
  });
  document.addEventListener("gone", () => {
    isGone = true;
    stop();
  });
  document.addEventListener("focusout", () => {
    if (isBehind) {
      refresh();
    }
  });
  if (!document.hidden) {
    listen();
  }
}

// ---- the table of episodes: only the rows in view exist

class Rows {
  constructor(view) {
    this.view = view;
    this.spacer = view.querySelector(".spacer");
    this.table = view.querySelector("table");
    this.body = view.querySelector("tbody");
    this.classes = [...view.querySelectorAll("thead th")].map((head) => head.className);
    this.outcome = 1 + this.classes.indexOf("of-outcome");
    this.pages = new Map();
    this.generation = 0;
    this.numRequests = 0;
    this.current = -1;
    this.isDue = false;
    view.addEventListener("scroll", () => this.schedule(), { passive: true });
    window.addEventListener("resize", () => {
      this.measure();
      this.schedule();
    });
    this.measure();
    this.take(view);
    view.scrollTop = Number(view.dataset.offset) * this.height;
  }

  measure() {
    const [row] = this.body.rows;
    this.height = (row && row.getBoundingClientRect().height) || this.height || 32;
    this.headHeight = this.table.tHead.getBoundingClientRect().height;
  }

  // Takes over what the server has put into a page: this one at first, then each fresh one, perhaps of another filter.
  take(fresh) {
    const isOther = fresh.dataset.rows !== this.view.dataset.rows;
    if (isOther) {
      this.pages.clear();
      this.current = -1;
    }
    this.generation += 1;
    for (const page of this.pages.values()) {
      page.isAsked = false;
    }
    this.total = Number(fresh.dataset.total);
    const offset = Number(fresh.dataset.offset);
    if (offset % PAGE_ROWS === 0) {
      const rows = [...fresh.querySelector("tbody").rows].map((row) => [
        new URL(this.linkOf(row).getAttribute("href"), location.href).searchParams.get("key"),
        ...[...row.cells].map((cell) => cell.textContent),
      ]);
      this.pages.set(offset / PAGE_ROWS, { generation: this.generation, rows });
    }
    if (fresh !== this.view) {
      Object.assign(this.view.dataset, fresh.dataset);
      const head = fresh.querySelector("thead");
      if (head.outerHTML !== this.table.tHead.outerHTML && !this.table.tHead.contains(document.activeElement)) {
        this.table.tHead.replaceWith(document.importNode(head, true));
      }
    }
    this.draw();
    if (isOther) {
      this.view.scrollTop = 0;
    }
  }

  schedule() {
    if (!this.isDue) {
      this.isDue = true;
      requestAnimationFrame(() => {
        this.isDue = false;
        this.draw();
      });
    }
  }

  draw() {
    const top = Math.max(0, Math.floor(this.view.scrollTop / this.height) - OVERSCAN);
    const count = Math.ceil(this.view.clientHeight / this.height) + 2 * OVERSCAN;
    const first = Math.max(0, Math.min(top, this.total - count));
    const last = Math.min(this.total, first + count);
    this.spacer.style.height = `${this.total * this.height + this.headHeight}px`;
    this.spacer.style.paddingTop = `${first * this.height}px`;
    this.table.setAttribute("aria-rowcount", String(this.total + 1));
    const hadFocus = this.body.contains(document.activeElement);
    while (this.body.rows.length > last - first) {
      this.body.deleteRow(-1);
    }
    while (this.body.rows.length < last - first) {
      this.addRow();
    }
    for (let index = first; index < last; index += 1) {
      this.fill(this.body.rows[index - first], index);
    }
    this.load(first, last);
    if (hadFocus && this.current >= first && this.current < last) {
      this.linkOf(this.body.rows[this.current - first]).focus({ preventScroll: true });
    }
  }

  addRow() {
    const row = this.body.insertRow();
    for (const name of this.classes) {
      const cell = row.insertCell();
      cell.className = name;
      cell.append(document.createElement(row.cells.length === 1 ? "a" : "span"));
    }
  }

  linkOf(row) {
    return row.cells[0].firstElementChild;
  }

  fill(row, index) {
    const page = this.pages.get(Math.floor(index / PAGE_ROWS));
    const values = page ? page.rows[index % PAGE_ROWS] : undefined;
    if (row.shown === values && row.index === index) {
      return;
    }
    row.shown = values;
    row.index = index;
    row.setAttribute("aria-rowindex", String(index + 2));
    const link = this.linkOf(row);
    if (values) {
      const address = new URL(this.view.dataset.episode, location.href);
      address.searchParams.set("key", values[0]);
      link.href = address.pathname + address.search;
    } else {
      link.removeAttribute("href");
    }
    link.textContent = values ? values[1] : "…";
    row.dataset.outcome = values ? values[this.outcome] : "";
    for (let column = 1; column < this.classes.length; column += 1) {
      row.cells[column].firstElementChild.textContent = values ? values[column + 1] : "";
    }
  }

  // What is not there, or out of date, is asked for; when it has come, what is in view by then.
  load(first, last) {
    // an empty list asks for its first page too: the run may have just begun
    for (let page = Math.floor(first / PAGE_ROWS); page * PAGE_ROWS < Math.max(last, 1); page += 1) {
      const known = this.pages.get(page);
      const isFresh = known && known.generation === this.generation;
      if (!isFresh && this.numRequests < MAX_REQUESTS && (!known || !known.isAsked)) {
        this.ask(page);
      }
    }
  }

  async ask(page) {
    const generation = this.generation;
    const known = this.pages.get(page);
    if (known) {
      known.isAsked = true;
    }
    const asked = this.view.dataset.rows;
    const address = new URL(asked, location.href);
    address.searchParams.set("offset", String(page * PAGE_ROWS));
    address.searchParams.set("limit", String(PAGE_ROWS));
    this.numRequests += 1;
    try {
      const answer = await fetch(address);
      const found = await answer.json();
      if (asked === this.view.dataset.rows) {
        this.total = found.total;
        this.pages.set(page, { generation, rows: found.rows });
      }
    } catch {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      if (known) {
        known.isAsked = false;
      }
    }
    this.numRequests -= 1;
    this.schedule();
  }

  move(step) {
    const shown = Math.floor(this.view.scrollTop / this.height);
    const from = this.current < 0 ? shown - Math.max(0, step) : this.current;
    this.current = Math.max(0, Math.min(this.total - 1, from + step));
    const top = this.current * this.height;
    const room = this.view.clientHeight - 3 * this.height;
    if (top < this.view.scrollTop) {
      this.view.scrollTop = top;
    } else if (top > this.view.scrollTop + room) {
      this.view.scrollTop = top - room;
    }
    this.draw();
    const row = [...this.body.rows].find((each) => each.index === this.current);
    if (row) {
      this.linkOf(row).focus({ preventScroll: true });
    }
  }
}

// ---- filters: they apply while they change, and the address follows

let typing = 0;

function applyFilters() {
  const filters = document.getElementById("filters");
  const address = new URL(filters.getAttribute("action"), location.href);
  for (const [name, value] of new FormData(filters)) {
    if (value.trim()) {
      address.searchParams.set(name, value);
    }
  }
  if (address.href !== location.href) {
    history.replaceState(null, "", address);
    refresh();
  }
}

function isFilter(event) {
  return (event.target.form || event.target).id === "filters";
}

main.addEventListener("input", (event) => {
  if (isFilter(event)) {
    clearTimeout(typing);
    typing = setTimeout(applyFilters, TYPING_MS);
  }
});
main.addEventListener("submit", (event) => {
  if (isFilter(event)) {
    event.preventDefault();
    applyFilters();
  }
});

// ---- the one thing that a page changes

main.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.id !== "rollback") {
    return;
  }
  event.preventDefault();
  if (window.confirm(form.dataset.ask)) {
    const address = `${form.dataset.post}?${new URLSearchParams(new FormData(form))}`;
    try {
      const answer = await fetch(address, { method: "POST", headers: { "x-reinforge": "rollback" } });
      form.lastElementChild.textContent = (await answer.json()).error || "";
      if (answer.ok) {
        location.reload();
      }
    } catch {
      form.lastElementChild.textContent = "Not rolled back: open the address that reinforge view printed.";
    }
  }
});

// ---- keys

function open(rel) {
  const link = document.querySelector(`a[rel=${rel}]`);
  if (link) {
    link.click();
  }
}

function changeColors() {
  const buttons = [...document.querySelectorAll("input[name=color]")];
  const chosen = buttons.findIndex((button) => button.checked);
  if (buttons.length) {
    buttons[(chosen + 1) % buttons.length].checked = true;
  }
}

function listenForKeys(rows) {
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input:not([type=radio]):not([type=checkbox]), select, textarea");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const search = document.getElementById("search");
    const actions = {
      j: () => (rows ? rows.move(1) : open("next")),
      k: () => (rows ? rows.move(-1) : open("prev")),
      "]": () => open("next"),
      "[": () => open("prev"),
      t: changeColors,
      "/": () => search && search.focus(),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  });
}

const view = document.getElementById("rows");
const rows = view ? new Rows(view) : null;
listenForKeys(rows);
if (main.dataset.live) {
  follow(main.dataset.live);
}
