// SPDX-License-Identifier: Apache-2.0
// The tree explorer of the report's page. Reads the data block #traces and draws one round at a time.
// Texts come from models and prompts: they reach the page as text nodes only, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 30, BOX = 24, GAP = 34, PAD = 12, MARGIN = 14;
const LONGEST = 16; // characters of a token that a box shows

const data = JSON.parse(document.getElementById("traces").textContent);
const explorer = document.getElementById("explorer");
const state = { request: 0, method: 0, round: 0 };
const find = (id) => document.getElementById(id);

// ---------------------------------------------------------------------- texts

// Controls get signs, so that none of them can hide or turn the text around it.
function readable(text) {
  return Array.from(text, (c) =>
    /\p{Cc}|\p{Cf}|\p{Zl}|\p{Zp}/u.test(c) && !"\n\t\u200d".includes(c)
      ? `⟨${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`
      : c,
  ).join("");
}

// A token as one line on which its blanks are seen.
function visible(text) {
  const signs = { " ": "·", "\n": "↵", "\t": "⇥" };
  return readable(text).replace(/[ \n\t]/g, (c) => signs[c]) || "∅";
}

function shortened(text) {
  const characters = Array.from(visible(text));
  return characters.length > LONGEST
    ? characters.slice(0, LONGEST - 1).join("") + "…"
    : characters.join("");
}

function percent(share) {
  const value = 100 * share;
  if (value >= 99.5) return "100%";
  if (value >= 9.5) return `${value.toFixed(0)}%`;
  return value >= 0.05 ? `${value.toFixed(1)}%` : "<0.1%";
}

const ruler = document.createElement("canvas").getContext("2d");
function width(text, font) {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// ---------------------------------------------------------------------- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---------------------------------------------------------------------- what is chosen

const requests = [];
for (const trace of data.traces) {
  let entry = requests.find((r) => r.dataset === trace.dataset && r.request === trace.request);
  if (!entry) {
    entry = { dataset: trace.dataset, request: trace.request, traces: [] };
    requests.push(entry);
  }
  entry.traces.push(trace);
}

const chosenTrace = () => requests[state.request].traces[state.method];
const chosenRound = () => chosenTrace().rounds[state.round];
const text = (id) => data.texts[id];

// Methods differ from request to request: stay with the one of the same name.
function chooseRequest(number) {
  const method = chosenTrace().method;
  state.request = number;
  const same = requests[number].traces.findIndex((t) => t.method === method);
  state.method = Math.max(0, same);
  state.round = 0;
  show();
}

function chooseMethod(number) {
  state.method = number;
  state.round = 0;
  show();
}

function chooseRound(number) {
  state.round = Math.min(Math.max(number, 0), chosenTrace().rounds.length - 1);
  show();
}

function options(select, labels, chosen) {
  select.replaceChildren(
    ...labels.map((label, i) => {
      const option = element("option", { value: i }, label);
      option.selected = i === chosen;
      return option;
    }),
  );
}

// ---------------------------------------------------------------------- the tree

// Columns are depths. The accepted path, and behind it the wanted token that the tree lacks, is a
// straight line at the top; other children follow by their score.
function layout(round) {
  const nodes = round.tokens.map((token, i) => ({
    number: i, token, parent: round.parents[i], score: round.scores[i], children: [],
    accepted: i === 0 || round.accepted.includes(i), wanted: false,
  }));
  for (const node of nodes.slice(1)) nodes[node.parent].children.push(node);
  if (round.wanted !== null) {
    const parent = round.accepted.length ? round.accepted[round.accepted.length - 1] : 0;
    const ghost = { number: nodes.length, token: round.wanted, parent, score: null, children: [],
      accepted: false, wanted: true };
    nodes[parent].children.push(ghost);
    nodes.push(ghost);
  }
  const first = (node) => Number(node.accepted || node.wanted);
  for (const node of nodes) {
    node.children.sort((a, b) => first(b) - first(a) || b.score - a.score || a.number - b.number);
  }
  let rows = 0;
  (function place(node, depth) {
    node.depth = depth;
    node.row = rows;
    for (const child of node.children) place(child, depth + 1);
    if (!node.children.length) rows += 1;
  })(nodes[0], 0);
  const lefts = [MARGIN];
  for (const node of nodes) {
    node.label = shortened(text(node.token));
    node.note = node.wanted ? "wanted" : node.number === 0 ? "anchor" : percent(Math.exp(node.score));
    node.width = 2 * PAD + width(node.label, "13px ui-monospace, monospace") + 8 +
      width(node.note, "11px system-ui, sans-serif");
  }
  for (let depth = 0; nodes.some((n) => n.depth === depth); depth += 1) {
    const widest = Math.max(...nodes.filter((n) => n.depth === depth).map((n) => n.width));
    lefts.push(lefts[depth] + widest + GAP);
  }
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = MARGIN + node.row * ROW;
  }
  return { nodes, width: lefts[lefts.length - 1] - GAP + MARGIN, height: 2 * MARGIN + rows * ROW };
}

function describe(node, nodes) {
  const name = `“${visible(text(node.token))}”`;
  if (node.wanted) return `${name}: the target's own token, which the tree does not hold here`;
  if (node.number === 0) return `${name}: the anchor, the last committed token`;
  const edge = Math.exp(node.score - (node.parent ? nodes[node.parent].score : 0));
  return `${name}: depth ${node.depth}, ${percent(edge)} after its parent, ` +
    `${percent(Math.exp(node.score))} as a path (score ${node.score.toFixed(3)})` +
    (node.accepted ? ", accepted" : "");
}

function drawTree(round) {
  const plan = layout(round);
  const svg = shape("svg", {
    width: plan.width, height: plan.height, viewBox: `0 0 ${plan.width} ${plan.height}`,
    role: "img", "aria-label": `draft tree of ${round.tokens.length - 1} nodes`,
  });
  for (const node of plan.nodes.slice(1)) {
    const parent = plan.nodes[node.parent];
    const [x1, y1, x2, y2] = [parent.x + parent.width, parent.y + BOX / 2, node.x, node.y + BOX / 2];
    const middle = Math.max(x1 + 10, x2 - GAP / 2);
    svg.append(shape("path", {
      class: `edge${node.accepted ? " accepted" : ""}${node.wanted ? " wanted" : ""}`,
      d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`,
    }));
  }
  for (const node of plan.nodes) {
    const elsewhere = round.elsewhere.includes(node.number);
    const kinds = [
      "node", node.number === 0 && "anchor", node.accepted && "accepted",
      node.wanted && "wanted", elsewhere && "elsewhere",
    ].filter(Boolean).join(" ");
    const group = shape("g", { class: kinds, transform: `translate(${node.x},${node.y})` });
    group.append(
      shape("title", {}, describe(node, plan.nodes)),
      shape("rect", { width: node.width, height: BOX, rx: 6 }),
      shape("text", { x: PAD, y: 16.5, class: "token" }, node.label),
      shape("text", { x: node.width - PAD, y: 16.5, class: "share" }, node.note),
    );
    group.addEventListener("mouseenter", () => {
      find("node-detail").textContent = describe(node, plan.nodes);
    });
    svg.append(group);
  }
  find("tree").replaceChildren(svg);
  // The end of the accepted path is what a round is about: bring it into view.
  const end = plan.nodes.find((n) => n.wanted) || plan.nodes[round.accepted.at(-1) || 0];
  const view = find("tree");
  view.scrollLeft = Math.max(0, end.x + end.width + MARGIN - view.clientWidth);
  view.scrollTop = 0;
  find("node-detail").textContent = "Point at a node for its probabilities.";
}

// ---------------------------------------------------------------------- beside the tree

function drawOutput(trace) {
  const anchor = text(trace.rounds[0].tokens[0]);
  const earlier = trace.rounds.slice(0, state.round).flatMap((r) => r.committed.map(text));
  const before = element("bdi", { class: "before" }, readable(trace.prefix + anchor + earlier.join("")));
  const round = chosenRound();
  const now = round.committed.map((token, i) => {
    const drafted = i < round.accepted.length;
    return element("bdi", { class: drafted ? "drafted" : "bonus" }, readable(text(token)));
  });
  find("output").replaceChildren(before, ...now);
  find("output").scrollTop = find("output").scrollHeight;
}

function drawTimeline(trace) {
  const most = Math.max(...trace.rounds.map((r) => Math.max(r.committed.length, r.chain || 0)));
  const step = 100 / trace.rounds.length;
  const svg = shape("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none" });
  trace.rounds.forEach((round, i) => {
    const bar = (value, kind) => shape("rect", {
      class: kind, x: i * step + step * 0.1, width: step * 0.8,
      y: 24 - (24 * value) / most, height: (24 * value) / most,
    });
    const group = shape("g", { class: i === state.round ? "chosen" : "" });
    group.append(
      shape("title", {}, `round ${i + 1}: ${round.committed.length} tokens`),
      shape("rect", { class: "hit", x: i * step, y: 0, width: step, height: 24 }),
      bar(round.committed.length, "tree-bar"),
    );
    if (round.chain !== null) group.append(bar(Math.min(round.chain, round.committed.length), "chain-bar"));
    group.addEventListener("click", () => chooseRound(i));
    svg.append(group);
  });
  find("timeline").replaceChildren(svg);
}

function drawFacts(round) {
  const fact = (id, value) => { find(id).textContent = value; };
  const drafted = Math.min(round.accepted.length, round.committed.length);
  const depth = layout(round).nodes.reduce((most, n) => (n.wanted ? most : Math.max(most, n.depth)), 0);
  fact("fact-committed", `${round.committed.length} (${drafted} drafted)`);
  fact("fact-nodes", `${round.tokens.length - 1}, ${depth} deep`);
  fact("fact-chain", round.chain === null ? "-" : String(round.chain));
  const won = round.chain === null ? null : round.committed.length - round.chain;
  fact("fact-width", won === null ? "-" : `${won > 0 ? "+" : ""}${won}`);
  find("fact-width").className = won > 0 ? "gain" : won < 0 ? "loss" : "";
  fact("fact-wanted", round.wanted === null ? "-" : visible(text(round.wanted)));
  fact("fact-reason", data.reasons[round.reason]);
}

function show() {
  const trace = chosenTrace();
  options(find("request"), requests.map((r) => `${r.dataset} · ${r.request}`), state.request);
  options(find("method"), requests[state.request].traces.map((t) => t.method), state.method);
  const last = trace.rounds.length - 1;
  Object.assign(find("round"), { max: last, value: state.round });
  find("round-number").textContent = `${state.round + 1} of ${last + 1}`;
  find("previous").disabled = state.round === 0;
  find("next").disabled = state.round === last;
  drawTree(chosenRound());
  drawOutput(trace);
  drawTimeline(trace);
  drawFacts(chosenRound());
}

// ---------------------------------------------------------------------- control

const moves = {
  ArrowLeft: () => chooseRound(state.round - 1),
  ArrowRight: () => chooseRound(state.round + 1),
  Home: () => chooseRound(0),
  End: () => chooseRound(chosenTrace().rounds.length - 1),
};

if (requests.length) {
  state.method = Math.max(0, requests[0].traces.findIndex((t) => t.method === data.method));
  find("previous").addEventListener("click", moves.ArrowLeft);
  find("next").addEventListener("click", moves.ArrowRight);
  find("round").addEventListener("input", (e) => chooseRound(Number(e.target.value)));
  find("request").addEventListener("change", (e) => chooseRequest(Number(e.target.value)));
  find("method").addEventListener("change", (e) => chooseMethod(Number(e.target.value)));
  // Selects and the slider have arrow keys of their own; elsewhere the arrows step while the
  // explorer has the focus or is under the reader's eyes.
  document.addEventListener("keydown", (event) => {
    const busy = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey ||
      /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName);
    const { top, bottom } = explorer.getBoundingClientRect();
    const seen = explorer.contains(event.target) || (top < innerHeight && bottom > 0);
    const move = seen && !busy && moves[event.key];
    if (!move || (!event.key.startsWith("Arrow") && !explorer.contains(event.target))) return;
    event.preventDefault();
    move();
  });
  show();
}
