// The page's only script beside uPlot: draws the curves, sorts and filters the table of runs, and while runs go on, asks
// the server of `tuner report --watch` for what is new.
"use strict";

const given = JSON.parse(document.getElementById("given").textContent);
const byId = (id) => document.getElementById(id);
const drawn = new Map(); // a chart's id -> {chart, box, lines, plot}
const hidden = new Set(); // numbers of the runs that the filter leaves out
const POLL_MS = 2000;
const FEW_POINTS = 30; // a lone point has no line to be seen by
const SMOOTHED = 40; // from this number of points on, a noisy curve gets a smooth one over it
const HEIGHT = 230;

// --- curves

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const widthOf = (box) => Math.max(box.clientWidth, 100);

function figureOf(chart) {
  const box = document.createElement("div");
  box.id = chart.id;
  box.setAttribute("role", "img");
  const figure = document.createElement("figure");
  figure.append(document.createElement("figcaption"), box);
  const later = [...drawn.values()].find((other) => other.chart.place > chart.place);
  byId("curves").insertBefore(figure, later ? later.box.parentElement : null);
  const entries = [...drawn, [chart.id, { chart, box, lines: [], plot: null, shown: "" }]];
  drawn.clear();
  entries.sort((one, other) => one[1].chart.place - other[1].chart.place).forEach(([id, entry]) => drawn.set(id, entry));
  new ResizeObserver(() => drawn.get(chart.id).plot?.setSize({ width: widthOf(box), height: HEIGHT })).observe(box);
  return drawn.get(chart.id);
}

// The mean of each point and its neighbours on both sides, so that the curve does not lag behind.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  const sums = [0];
  values.forEach((value) => sums.push(sums.at(-1) + value));
  return values.map((_, at) => {
    const [first, end] = [Math.max(0, at - reach), Math.min(values.length, at + reach + 1)];
    return (sums[end] - sums[first]) / (end - first);
  });
}

function number(value, chart) {
  if (value == null) return "";
  if (chart.exponents === "e" && value !== 0) return Number(value.toPrecision(4)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

// Each line, and below a noisy one's name a smooth curve that has no name of its own.
function seriesOf(lines, chart) {
  const data = [];
  const series = [{ label: "step", value: (_, step) => step?.toLocaleString("en") ?? "last" }];
  for (const line of lines) {
    const isSmoothed = chart.noisy && line.dash === "solid" && line.x.length >= SMOOTHED;
    const value = (_plot, at, _index, place) => number(place == null ? line.y.at(-1) : at, chart) || "-";
    const dash = line.dash === "dot" ? [3, 4] : undefined;
    const points = { show: line.x.length < FEW_POINTS, size: 5, fill: line.colour };
    const stroke = isSmoothed ? `${line.colour}55` : line.colour;
    series.push({ label: line.name, value, stroke, ink: line.colour, dash, points, width: isSmoothed ? 1 : 1.8 });
    data.push([line.x, line.y]);
    if (isSmoothed) {
      series.push({ class: "smooth", stroke: line.colour, points: { show: false }, width: 2 });
      data.push([line.x, smooth(line.y)]);
    }
  }
  return { series, data: data.length ? uPlot.join(data) : [[]] };
}

function optionsOf(entry, series) {
  const { chart, box } = entry;
  const axis = { stroke: () => css("--soft"), font: "12px system-ui, sans-serif" };
  const lines = { stroke: () => css("--line"), width: 1 };
  const ink = (_, place) => series[place].ink;
  const values = (_, ticks) => ticks.map((tick) => number(tick, chart));
  return {
    width: widthOf(box), height: HEIGHT, series,
    scales: { x: { time: false }, y: chart.range === "tozero" ? { range: (_, low, high) => [Math.min(0, low), 1.1 * high || 1] } : {} },
    axes: [{ ...axis, grid: lines, ticks: lines, size: 30, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
      { ...axis, grid: lines, ticks: lines, size: 62, values }],
    cursor: { points: { size: 6 } },
    legend: { mount: (_, legend) => box.parentElement.append(legend), markers: { stroke: ink, fill: ink } },
  };
}

function plot(entry) {
  const { chart, box } = entry;
  const note = document.createElement("small");
  note.textContent = chart.note;
  box.previousElementSibling.replaceChildren(chart.title, ...(chart.note ? [note] : []));
  const lines = entry.lines.filter((line) => !hidden.has(line.run) && line.x.length);
  const ends = lines.map((line) => `${line.name}: ${line.y.at(-1).toPrecision(5)} at step ${line.x.at(-1)}`);
  box.setAttribute("aria-label", `${chart.title} by step. ${ends.join("; ")}.`);
  const { series, data } = seriesOf(lines, chart);
  const shown = JSON.stringify(series.map((one) => [one.label, one.points?.show]));
  if (entry.plot && entry.shown === shown) {
    const { min, max } = entry.plot.scales.x;
    const [steps] = entry.plot.data;
    entry.plot.series.forEach((one, place) => (one.value = series[place].value ?? one.value));
    entry.plot.setData(data, !(min > steps[0] || max < steps.at(-1))); // what the user has zoomed to stays
    return;
  }
  entry.plot?.destroy();
  box.parentElement.querySelector(".u-legend")?.remove();
  entry.shown = shown;
  entry.plot = new uPlot(optionsOf(entry, series), data, box);
}

function draw(charts) {
  byId("no-curves").hidden ||= charts.length > 0;
  for (const { lines, ...chart } of charts) {
    const entry = drawn.get(chart.id) || figureOf(chart);
    entry.chart = chart;
    entry.lines = lines;
    plot(entry);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((entry) => entry.plot.redraw(false)));

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
  let message = "";
  try {
    const asked = byId("filter").value.split(/\s+/).filter(Boolean).map(condition);
    hidden.clear();
    for (const row of rows) {
      row.hidden = !asked.every((holds) => holds(row));
      if (row.hidden) hidden.add(Number(row.dataset.run));
    }
    message = asked.length ? `${rows.length - hidden.size} of ${rows.length} runs` : "";
  } catch (error) {
    message = error.message;
  }
  if (byId("shown").textContent !== message) byId("shown").textContent = message;
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
    tell("Live: updates every two seconds.");
  } catch {
    tell("Connection lost: tuner report has stopped or cannot be reached. The page shows the last update.");
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
