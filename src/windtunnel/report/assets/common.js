"use strict";
// Shared by the charts: the page's data, colours of the style sheet, formats, canvases, the tip.
const DATA = JSON.parse(document.getElementById("data").textContent);

function unpack(text, Type) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Type(bytes.buffer);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function digits(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en", {
    minimumFractionDigits: size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2,
    maximumFractionDigits: size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2,
  });
}

function seconds(value) {
  const size = Math.abs(value);
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (size >= 0.9995 * scale) return digits(value / scale) + " " + unit;
  }
  return value === 0 ? "0 s" : digits(value / 1e-9) + " ns";
}

function bytes(value) {
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (Math.abs(value) >= 0.9995 * 1024 ** power) return digits(value / 1024 ** power) + " " + unit;
  }
  return Math.round(value) + " B";
}

function figure(value, unit) {
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return (value * 100).toFixed(1) + " %";
  return digits(value) + " " + unit;
}

// A canvas as sharp as the screen; returns its context and width in CSS pixels.
function prepare(canvas, height) {
  const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

const tip = document.getElementById("tip");

function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}

// Round steps (1, 2, 5 times a power of ten) that cut `span` into at most `most` parts.
function step(span, most) {
  const raw = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  return power * (raw <= power ? 1 : raw <= 2 * power ? 2 : raw <= 5 * power ? 5 : 10);
}

const redraws = [];
let redrawn = 0;
function redrawAll() {
  cancelAnimationFrame(redrawn);
  redrawn = requestAnimationFrame(() => redraws.forEach((draw) => draw()));
}
addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// Tables sort by a click on a heading.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") !== "descending";
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = value(a), y = value(b);
      const order = isNaN(x) || isNaN(y) ? String(x).localeCompare(y) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
