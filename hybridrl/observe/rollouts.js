"use strict";
// Everything that a run wrote reaches the page as text (textContent), never as markup.
const SHOWN = 200; // samples that the list shows before more are asked for
const byId = id => document.getElementById(id);
const form = byId("controls"), list = byId("list"), main = byId("sample"), token = byId("token");

function make(tag, text, props) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.append(text);
  return Object.assign(node, props || {});
}

// Characters that hide, or change the direction of what follows them, are shown by number.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff]/u;
function plain(text) {
  const parts = document.createDocumentFragment();
  let run = "";
  for (const char of String(text)) {
    if (!HIDDEN.test(char)) { run += char; continue; }
    parts.append(run, make("span", "U+" + char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"), { className: "odd" }));
    run = "";
  }
  parts.append(run);
  return parts;
}

const number = value => value === null || value === undefined ? "–"
  : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
const shown = value => typeof value === "string" ? value : typeof value === "number" ? number(value) : JSON.stringify(value);
const mean = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

const COLOURS = {
  "log-prob": {
    of: (tokens, at) => tokens.mask[at] === "1" && tokens.log_probs ? tokens.log_probs[at] : null,
    paint: value => `rgba(var(--low),${(Math.min(1, -value / 5) * 0.75).toFixed(3)})`,
    ends: ["0", "-5 and below"], picture: "linear-gradient(90deg,transparent,rgba(var(--low),.75))",
  },
  advantage: {
    of: (tokens, at) => tokens.mask[at] === "1" && tokens.advantages ? tokens.advantages[at] : null,
    paint: value => `rgba(var(--${value < 0 ? "low" : "high"}),${(Math.min(1, Math.abs(value) / 2) * 0.75).toFixed(3)})`,
    ends: ["-2", "2"], picture: "linear-gradient(90deg,rgba(var(--low),.75),transparent,rgba(var(--high),.75))",
  },
  mask: {
    of: (tokens, at) => Number(tokens.mask[at]),
    paint: value => value ? "rgba(var(--own),.35)" : "rgba(var(--given),.25)",
    ends: ["given", "trained on"], picture: "linear-gradient(90deg,rgba(var(--given),.25) 50%,rgba(var(--own),.35) 50%)",
  },
  "trainer - sampler": {
    of: (tokens, at) => tokens.mask[at] === "1" && tokens.log_probs && tokens.old_log_probs
      ? tokens.old_log_probs[at] - tokens.log_probs[at] : null,
    paint: value => `rgba(var(--${value < 0 ? "low" : "high"}),${(Math.min(1, Math.abs(value) / 0.5) * 0.75).toFixed(3)})`,
    ends: ["-0.5", "0.5"], picture: "linear-gradient(90deg,rgba(var(--low),.75),transparent,rgba(var(--high),.75))",
  },
  none: { of: () => null, paint: () => "", ends: ["", ""], picture: "none" },
};
const events = (sample, kind) => (sample.session.events || []).filter(event => event.kind === kind);
const WHICH = {
  "all": () => true,
  "called a tool": sample => events(sample, "tool").length > 0,
  "a call failed": sample => events(sample, "tool").some(call => call.fault) || Object.keys(sample.session.tool_faults || {}).length > 0,
  "several turns": sample => turnsOf(sample) > 1,
  "stopped by length": sample => events(sample, "generate").some(turn => turn.finish_reason === "length"),
  "with tokens": sample => Boolean(sample.tokens),
};
const score = (sample, other) => sample.score === null ? other : sample.score;
const LENGTH = sample => sample.tokens ? sample.tokens.ids.length + (sample.tokens.gap ? sample.tokens.gap[1] : 0) : sample.output.length;
const ORDERS = {
  "step": (a, b) => a.at - b.at,
  "highest score": (a, b) => score(b, -Infinity) - score(a, -Infinity) || a.at - b.at,
  "lowest score": (a, b) => score(a, Infinity) - score(b, Infinity) || a.at - b.at,
  "longest": (a, b) => LENGTH(b) - LENGTH(a) || a.at - b.at,
  "least likely": (a, b) => (a.likely ?? 0) - (b.likely ?? 0) || a.at - b.at,
};

function segmentsOf(tokens) { // [{own, start, end}]: runs of tokens that were generated or given
  const found = [];
  for (let at = 0; at < tokens.mask.length; at++) {
    const last = found[found.length - 1], own = tokens.mask[at] === "1";
    const apart = tokens.gap && tokens.gap[0] === at;
    if (last && last.own === own && !apart) last.end = at + 1;
    else found.push({ own, start: at, end: at + 1, gap: apart ? tokens.gap[1] : 0 });
  }
  return found;
}
const turnsOf = sample => events(sample, "generate").length
  || (sample.tokens ? segmentsOf(sample.tokens).filter(part => part.own).length : 1);

let samples = [], fitting = [], limit = SHOWN, current = null, other = null, lit = null;

function hay(sample) {
  if (sample.hay !== undefined) return sample.hay;
  const said = (sample.session.messages || []).map(message => shown(message.content ?? ""));
  const called = events(sample, "tool").flatMap(call => [call.name, shown(call.arguments), shown(call.response ?? ""), call.fault]);
  sample.hay = [sample.prompt, sample.output, sample.expected, sample.uid, sample.session.agent_name, JSON.stringify(sample.columns),
    ...said, ...called].join("\n").toLowerCase();
  return sample.hay;
}

function filter() {
  const words = form.words.value.toLowerCase();
  const low = form.low.value === "" ? -Infinity : Number(form.low.value);
  const high = form.high.value === "" ? Infinity : Number(form.high.value);
  const bounded = form.low.value !== "" || form.high.value !== "";
  fitting = samples.filter(sample => (!form.kind.value || sample.kind === form.kind.value)
    && (!form.step.value || String(sample.step) === form.step.value)
    && (!bounded || sample.score !== null && sample.score >= low && sample.score <= high)
    && WHICH[form.which.value](sample) && (!words || hay(sample).includes(words)));
  fitting.sort(ORDERS[form.order.value]);
  limit = SHOWN;
  list.replaceChildren();
  if (fitting.includes(current)) draw(); else choose(fitting[0] || null);
}

function draw() {
  list.replaceChildren(...fitting.slice(0, limit).map(sample => {
    const item = make("li", null, { id: "s" + sample.at });
    const head = make("div");
    head.append(make("b", number(sample.score)), make("small", ` ${sample.kind} step ${sample.step} · ${turnsOf(sample)} turn${turnsOf(sample) > 1 ? "s" : ""}`
      + ` · ${LENGTH(sample)} ${sample.tokens ? "tokens" : "characters"}`));
    const text = make("div");
    text.append(plain(sample.prompt.replace(/\s+/g, " ").slice(-44)));
    item.append(head, text);
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", sample === current);
    item.addEventListener("click", () => choose(sample));
    return item;
  }));
  byId("count").textContent = fitting.length === samples.length ? `${samples.length} samples` : `${fitting.length} of ${samples.length} samples`;
  const more = byId("more");
  more.hidden = fitting.length <= limit;
  more.textContent = `${fitting.length - limit} more`;
  mark();
}

function mark() {
  for (const item of list.children) item.setAttribute("aria-selected", current !== null && item.id === "s" + current.at);
  if (current) list.setAttribute("aria-activedescendant", "s" + current.at); else list.removeAttribute("aria-activedescendant");
}

function choose(sample, beside) {
  current = sample;
  other = beside || null;
  if (sample && fitting.indexOf(sample) >= limit) limit = fitting.indexOf(sample) + SHOWN;
  if (list.children.length === 0 || sample && !byId("s" + sample.at) || !sample) draw(); else mark();
  if (sample) byId("s" + sample.at)?.scrollIntoView({ block: "nearest" });
  if (sample) history.replaceState(null, "", "#" + (other ? `${sample.at},${other.at}` : sample.at));
  show();
}

function show() {
  token.textContent = ""; lit = null;
  if (!current) { main.replaceChildren(make("p", samples.length ? "No sample fits." : "")); return; }
  const panes = make("div", null, { className: "panes" });
  for (const sample of other ? [current, other] : [current]) panes.append(pane(sample));
  main.replaceChildren(make("h2", `${current.kind}, step ${current.step}`), relatives(current), heading("prompt"), block(current.prompt, "in"), panes);
}

const heading = text => make("h3", text);
function block(text, className) { const node = make("pre", null, { className: className || "" }); node.append(plain(text)); return node; }

// The answers to the prompt of a sample in every step: what training changed.
function relatives(sample) {
  const box = make("div", null, { className: "chips" });
  const same = samples.filter(one => one.kind === sample.kind && one.prompt === sample.prompt).sort(ORDERS.step);
  const steps = [...new Set(same.map(one => one.step))];
  if (same.length < 2) { box.append("the only answer to this prompt on this page"); return box; }
  if (steps.length > 1) {
    const button = make("button", "before and after", { type: "button", id: "compare" });
    const number = same.filter(one => one.step === sample.step).indexOf(sample);
    const pick = step => { const there = same.filter(one => one.step === step); return there[Math.min(number, there.length - 1)]; };
    button.addEventListener("click", () => { choose(pick(steps[0]), pick(steps[steps.length - 1])); byId("compare")?.focus(); });
    box.append(button);
  }
  box.append(`${same.length} answers to this prompt; one next to the other:`);
  for (const step of steps) {
    const group = make("span", `step ${step} `);
    for (const one of same.filter(each => each.step === step)) {
      const button = make("button", number(one.score), { type: "button", title: `sample ${one.at}` });
      button.setAttribute("aria-pressed", one === current || one === other);
      button.addEventListener("click", () => choose(current, one === current ? null : one));
      group.append(button, " ");
    }
    box.append(group);
  }
  return box;
}

function facts(sample) {
  const rows = make("dl"), session = sample.session;
  const add = (name, value) => {
    if (value === undefined || value === null || value === "") return;
    const text = make("dd");
    text.append(plain(shown(value)));
    rows.append(make("dt", name), text);
  };
  add("step", `${sample.step} (${sample.kind})`);
  add("score", number(sample.score));
  add("expected", sample.expected);
  add("uid, sample", `${sample.uid}, ${session.sample ?? "–"}${session.trajectory_index ? `, part ${session.trajectory_index}` : ""}`);
  add("agent", session.agent_name);
  if (session.seconds !== undefined) add("session", `${number(session.seconds)} s, began ${new Date(session.started * 1000).toISOString()}`);
  if (session.turn_rewards && session.turn_rewards.length) add("rewards of turns", session.turn_rewards.map(shown).join(", "));
  if (sample.tokens?.versions) add("weights of step", [...new Set(sample.tokens.versions.map(pair => pair[0]).filter(one => one >= 0))].join(", "));
  for (const [name, value] of Object.entries(sample.columns)) add(name, value);
  return rows;
}

function pane(sample) {
  const node = make("article", null, { className: "pane" });
  node.append(facts(sample));
  if (sample.tokens) node.append(...turns(sample));
  else if (sample.session.messages) for (const message of sample.session.messages) node.append(heading(shown(message.role)), block(shown(message.content)));
  else node.append(heading("answer"), block(sample.output));
  const calls = events(sample, "tool");
  if (!sample.tokens) calls.forEach(call => node.append(tool(call)));
  if (sample.tokens && sample.session.messages) {
    const whole = make("details");
    whole.append(make("summary", `${sample.session.messages.length} messages`));
    for (const message of sample.session.messages) whole.append(heading(shown(message.role)), block(shown(message.content)));
    node.append(whole);
  }
  return node;
}

function tool(call) {
  const node = make("details", null, { open: Boolean(call.fault) }), head = make("summary");
  head.append(plain(`${call.name}: ${shown(call.arguments)}`), make("small", ` ${number(call.seconds)} s${call.reward === null || call.reward === undefined ? "" : `, reward ${number(call.reward)}`}`));
  if (call.fault) head.append(make("b", ` ${call.fault}`, { className: "fault" }));
  node.append(head, block(shown(call.response ?? "")));
  return node;
}

function turns(sample) {
  const tokens = sample.tokens, parts = segmentsOf(tokens), generated = events(sample, "generate"), found = [];
  const own = parts.filter(part => part.own).length;
  let turn = 0;
  for (const part of parts) {
    if (part.gap) found.push(make("p", `${part.gap} tokens are left out here`, { className: "fault" }));
    const node = make("section", null, { className: "turn" }), head = heading("");
    const rewards = tokens.rewards.filter(([at]) => at >= part.start && at < part.end);
    head.append(make("b", part.own ? `model, turn ${turn + 1}` : "given"), ` ${part.end - part.start} tokens`);
    if (part.own && tokens.log_probs) head.append(`, mean log-prob ${number(mean(tokens.log_probs.slice(part.start, part.end)))}`);
    if (part.own && generated.length === own) head.append(`, ${number(generated[turn].seconds)} s, ${generated[turn].finish_reason}`);
    if (rewards.length) head.append(make("b", ` reward ${rewards.map(pair => number(pair[1])).join(", ")}`));
    node.append(head, tokenBox(sample, part));
    if (part.own) events(sample, "tool").filter(call => call.turn === turn).forEach(call => node.append(tool(call)));
    if (part.own) turn += 1;
    found.push(node);
  }
  return found.length ? found : [make("p", "no tokens were generated")];
}

function tokenBox(sample, part) {
  const box = make("div", null, { className: "tokens" + (part.own ? "" : " given"), tabIndex: 0 });
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `tokens ${part.start} to ${part.end - 1}; left and right move`);
  for (let at = part.start; at < part.end; at++) {
    const span = make("span");
    // a part of a character, whose last token has it
    span.append(sample.tokens.texts[at] ? plain(sample.tokens.texts[at]) : make("i", "◦", { className: "odd" }));
    span.dataset.at = at;
    paint(span, sample.tokens, at);
    box.append(span);
  }
  const pick = span => { if (lit) lit.classList.remove("on"); lit = span; span.classList.add("on"); tell(sample, Number(span.dataset.at)); };
  const near = event => event.target.closest?.("[data-at]");
  box.addEventListener("mouseover", event => { const span = near(event); if (span) tell(sample, Number(span.dataset.at)); });
  box.addEventListener("click", event => { const span = near(event); if (span) pick(span); });
  box.addEventListener("keydown", event => {
    const spans = box.children, at = [...spans].indexOf(lit);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    pick(spans[Math.max(0, Math.min(spans.length - 1, to))]);
    lit.scrollIntoView({ block: "nearest" });
  });
  box.sample = sample;
  return box;
}

function paint(span, tokens, at) {
  const colour = COLOURS[form.colour.value], value = colour.of(tokens, at);
  span.style.background = value === null || value === undefined ? "" : colour.paint(value);
}

function repaint() {
  for (const box of main.querySelectorAll(".tokens")) for (const span of box.children) paint(span, box.sample.tokens, Number(span.dataset.at));
  const colour = COLOURS[form.colour.value];
  byId("scale").style.background = colour.picture;
  byId("scale").hidden = colour.picture === "none";
  byId("legend").textContent = colour.ends[0] ? `${colour.ends[0]} to ${colour.ends[1]}` : "";
}

function tell(sample, at) {
  const tokens = sample.tokens, parts = [`token ${at}, id ${tokens.ids[at]}`, tokens.mask[at] === "1" ? "trained on" : "given"];
  const add = (name, values) => { if (values && values[at] !== null) parts.push(`${name} ${number(values[at])}`); };
  if (tokens.mask[at] === "1") {
    add("log-prob", tokens.log_probs);
    if (tokens.log_probs && tokens.log_probs[at] !== null) parts.push(`probability ${number(Math.exp(tokens.log_probs[at]))}`);
    add("trainer's log-prob", tokens.old_log_probs);
    add("advantage", tokens.advantages);
  }
  const reward = tokens.rewards.find(pair => pair[0] === at);
  if (reward) parts.push(`reward ${number(reward[1])}`);
  const text = make("code");
  text.append(plain(JSON.stringify(tokens.texts[at] ?? "")));
  token.replaceChildren(text, " " + parts.join(" · "));
}

function step(by) {
  const at = fitting.indexOf(current) + by;
  if (fitting.length) choose(fitting[Math.max(0, Math.min(fitting.length - 1, at))]);
}

list.addEventListener("keydown", event => {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  step(by);
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "/") { event.preventDefault(); form.words.focus(); }
  if (event.key === "c") {
    form.colour.selectedIndex = (form.colour.selectedIndex + 1) % form.colour.options.length;
    repaint();
  }
});
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", event => { if (event.target === form.colour) repaint(); else filter(); });
byId("more").addEventListener("click", () => { limit += SHOWN; draw(); });

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), char => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function start() {
  const data = await unpacked();
  for (const dump of data.dumps) for (const sample of dump.samples) {
    const tokens = sample.tokens;
    const own = tokens && tokens.log_probs ? tokens.log_probs.filter((value, at) => tokens.mask[at] === "1" && value !== null) : [];
    samples.push(Object.assign(sample, { kind: dump.kind, step: dump.step, at: samples.length, likely: mean(own) }));
  }
  for (const [name, values] of [["kind", data.dumps.map(one => one.kind)], ["step", data.dumps.map(one => one.step).sort((a, b) => a - b)]])
    for (const value of new Set(values)) form[name].append(make("option", String(value)));
  for (const [name, table] of [["which", WHICH], ["order", ORDERS], ["colour", COLOURS]])
    for (const value of Object.keys(table)) form[name].append(make("option", value));
  byId("notes").textContent = data.notes.length ? data.notes.join("; ") + "." : "All dumped samples are here.";
  repaint();
  const wanted = location.hash.slice(1).split(",").map(Number).map(at => samples[at]);
  filter();
  if (location.hash && wanted[0]) choose(wanted[0], wanted[1]);
  document.documentElement.dataset.ready = "1";
}
start().catch(error => { byId("notes").textContent = `The samples cannot be shown: ${error}`; });
