// The page's only script beside Plotly: draws the curves, sorts and filters the table of runs, and where the page is
// served while runs go on, asks for what is new.
"use strict";

const given = JSON.parse(document.getElementById("given").textContent);
const byId = (id) => document.getElementById(id);
const drawn = new Map(); // a chart's id -> {chart, box, lines: a line's key -> trace}
const hidden = new Set(); // numbers of the runs that the filter leaves out
const POLL_MS = 2000;
const FEW_POINTS = 30; // a lone point has no line to be seen by

// --- curves

function figureOf(chart) {
  const box = document.createElement("div");
  box.id = chart.id;
  box.setAttribute("role", "img");
  const figure = document.createElement("figure");
  figure.append(document.createElement("figcaption"), box);
  const later = [...drawn.values()].find((other) => other.chart.place > chart.place);
  byId("curves").insertBefore(figure, later ? later.box.parentElement : null);
  const entries = [...drawn, [chart.id, { chart, box, lines: new Map() }]];
  drawn.clear();
  entries.sort((one, other) => one[1].chart.place - other[1].chart.place).forEach(([id, entry]) => drawn.set(id, entry));
  return drawn.get(chart.id);
}

function grown(trace, line) {
  const x = trace ? trace.x.slice(0, line.from).concat(line.x) : line.x;
  const y = trace ? trace.y.slice(0, line.from).concat(line.y) : line.y;
  return {
    type: "scatter", x, y, run: line.run, name: line.name,
    mode: x.length < FEW_POINTS ? "lines+markers" : "lines",
    line: { color: line.colour, width: 1.8, dash: line.dash },
    marker: { size: 5 }, hovertemplate: "%{y:.5~g}",
  };
}

function plot(entry) {
  const { chart, box, lines } = entry;
  const note = document.createElement("small");
  note.textContent = chart.note;
  box.previousElementSibling.replaceChildren(chart.title, ...(chart.note ? [note] : []));
  const traces = [...lines.values()].map((trace) => ({ ...trace, visible: !hidden.has(trace.run) }));
  const ends = traces.filter((trace) => trace.visible && trace.x.length)
    .map((trace) => `${trace.name}: ${trace.y.at(-1).toPrecision(5)} at step ${trace.x.at(-1)}`);
  box.setAttribute("aria-label", `${chart.title} by step. ${ends.join("; ")}.`);
  const layout = {
    height: 260, margin: { l: 56, r: 12, t: 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false, hovermode: "x unified",
    uirevision: "kept", // what the user has zoomed to stays while points are added
    xaxis: { title: { text: "step" }, rangemode: "tozero", hoverformat: ",d" },
    yaxis: { exponentformat: chart.exponents, rangemode: chart.range, separatethousands: true, automargin: true },
    font: { family: "system-ui, sans-serif", size: 12 },
  };
  Plotly.react(box, traces, layout, { responsive: true, displayModeBar: false });
}

function draw(charts) {
  byId("no-curves").hidden ||= charts.length > 0;
  for (const { lines, ...chart } of charts) {
    const entry = drawn.get(chart.id) || figureOf(chart);
    entry.chart = chart;
    for (const line of lines) {
      const key = `${line.run} ${line.dash}`;
      entry.lines.set(key, grown(entry.lines.get(key), line));
    }
    plot(entry);
  }
}

// --- the table of runs

const order = { key: null, descending: false };
const cellsOf = (row) => [...row.children];
const columns = () => [...byId("columns").querySelectorAll("th")];
const valueOf = (cell) => (cell.dataset.value ?? cell.textContent).trim();

function compared(one, other) {
  const [left, right] = [Number(one), Number(other)];
  return Number.isNaN(left) || Number.isNaN(right) ? one.localeCompare(other) : left - right;
}

function sort() {
  const place = columns().findIndex((column) => column.dataset.key === order.key);
  columns().forEach((column, index) =>
    column.setAttribute("aria-sort", index !== place ? "none" : order.descending ? "descending" : "ascending"));
  const body = byId("runs_table");
  const keyed = [...body.rows].map((row) => [place < 0 ? row.dataset.run : valueOf(cellsOf(row)[place]), row]);
  const filled = keyed.filter(([value]) => value !== "").sort(([one], [other]) => compared(one, other));
  if (order.descending) filled.reverse();
  body.append(...[...filled, ...keyed.filter(([value]) => value === "")].map(([, row]) => row)); // blanks last
}

function clickable() {
  for (const column of columns().filter((one) => !one.querySelector("button"))) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...column.childNodes);
    button.addEventListener("click", () => {
      order.descending = order.key === column.dataset.key && !order.descending;
      order.key = column.dataset.key;
      sort();
    });
    column.append(button);
  }
}

const COMPARISONS = {
  "=": (sign) => sign === 0, "!=": (sign) => sign !== 0, "<": (sign) => sign < 0,
  ">": (sign) => sign > 0, "<=": (sign) => sign <= 0, ">=": (sign) => sign >= 0,
};

// `lr>1e-5` asks the column whose key ends in lr; any other word has to stand in the row.
function condition(word) {
  const [, key, sign, wanted] = word.match(/^([^<>=!]+)(<=|>=|!=|=|<|>)(.+)$/) || [];
  if (!key) return (row) => row.textContent.toLowerCase().includes(word.toLowerCase());
  const ends = (column) => `.${column.dataset.key}`.endsWith(`.${key}`);
  const place = columns().findIndex(ends);
  if (place < 0) throw new Error(`No column ends in ${key}.`);
  return (row) => {
    const text = valueOf(cellsOf(row)[place]);
    return text !== "" && COMPARISONS[sign](compared(text, wanted));
  };
}

function filter() {
  const rows = [...byId("runs_table").rows];
  const before = new Set(hidden);
  let told = "";
  try {
    const asked = byId("filter").value.split(/\s+/).filter(Boolean).map(condition);
    hidden.clear();
    for (const row of rows) {
      row.hidden = !asked.every((holds) => holds(row));
      if (row.hidden) hidden.add(Number(row.dataset.run));
    }
    told = asked.length ? `${rows.length - hidden.size} of ${rows.length} runs` : "";
  } catch (error) {
    told = error.message;
  }
  if (byId("shown").textContent !== told) byId("shown").textContent = told;
  if (hidden.size !== before.size || [...hidden].some((run) => !before.has(run))) drawn.forEach(plot);
}

function arrange() {
  if (!byId("sieve")) return; // one run
  clickable();
  sort();
  filter();
}

// --- reading with the keyboard

// What is wider than the window can be scrolled by arrow keys once it has the focus; what fits is no stop on the way.
function reachable() {
  for (const box of document.querySelectorAll(".scroll")) {
    const [heading] = box.closest("section").getElementsByTagName("h2");
    const isWide = box.scrollWidth > box.clientWidth;
    const values = { tabindex: "0", role: "group", "aria-label": heading.textContent };
    Object.entries(values).forEach(([name, value]) => isWide ? box.setAttribute(name, value) : box.removeAttribute(name));
  }
}

// --- while runs go on

let version = given.version;

function tell(text) {
  if (byId("live").textContent !== text) byId("live").textContent = text; // said once to who cannot see it
}

async function poll() {
  try {
    const answer = await fetch(`news?since=${version}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const news = await answer.json();
    for (const [id, html] of Object.entries(news.parts)) byId(id).innerHTML = html; // escaped by the server
    draw(news.charts);
    if (Object.keys(news.parts).length) {
      arrange();
      reachable();
    }
    version = news.version;
    tell("Live: what is new is shown every two seconds.");
  } catch {
    tell("The connection is lost: tuner report has ended, or cannot be reached. This is what it showed last.");
  }
  setTimeout(poll, POLL_MS);
}

draw(given.charts);
if (byId("sieve")) {
  byId("sieve").hidden = false;
  byId("filter").addEventListener("input", filter);
}
arrange();
reachable();
window.addEventListener("resize", reachable);
if (byId("live")) setTimeout(poll, POLL_MS);
