// The timeline: spans of the chosen ranks on a canvas; drag to pan, Ctrl and wheel or + and - to zoom.
(() => {
  const data = DATA.timeline;
  if (!data) return;
  const canvas = document.querySelector("#timeline canvas");
  const start = unpack(data.start, Uint32Array), width = unpack(data.width, Uint32Array);
  const name = unpack(data.name, data.wide ? Uint32Array : Uint16Array), kind = unpack(data.kind, Uint8Array);
  const LABEL = 118, ROW = 22, HEAD = 20, AXIS = 24, SHADES = [1, 0.86, 0.74, 0.92];
  const shown = new Set(data.ranks.slice(0, 4));
  let from = 0, to = data.span, rows = [], wanted = null, pending = 0;

  function layout() {
    rows = [];
    let y = AXIS;
    for (const rank of data.ranks) {
      if (!shown.has(rank)) continue;
      rows.push({ y, rank });
      y += HEAD;
      for (const track of data.tracks) {
        if (track.rank !== rank) continue;
        rows.push({ y, track });
        y += ROW;
      }
      y += 6;
    }
    return Math.max(y, AXIS + 40);
  }

  // The first span of a track that ends after `tick`: spans are in order and do not overlap.
  function search(track, tick) {
    let low = track.begin, high = track.end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] + width[middle] <= tick) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    const [g, total] = prepare(canvas, layout());
    const scale = (total - LABEL) / (to - from), paints = data.kinds.map(colour);
    const ink = colour("ink"), soft = colour("soft"), line = colour("line"), onSpan = colour("on-span");
    const x = (time) => LABEL + (time - from) * scale;
    const every = step(to - from, (total - LABEL) / 110);
    for (let i = Math.ceil(from / every); i * every <= to; i++) {
      g.fillStyle = line;
      g.fillRect(x(i * every), AXIS - 4, 1, canvas.clientHeight);
      g.fillStyle = soft;
      g.fillText(seconds(+(i * every).toPrecision(12)), x(i * every) + 4, 10);
    }
    for (const row of rows) {
      if (!row.track) {
        g.fillStyle = ink;
        g.font = "600 12px system-ui, sans-serif";
        g.fillText("rank " + row.rank, 2, row.y + HEAD / 2 + 1);
        g.font = "12px system-ui, sans-serif";
        continue;
      }
      g.fillStyle = soft;
      g.fillText(row.track.queue, 12, row.y + ROW / 2, LABEL - 18);
      g.save();
      g.beginPath();
      g.rect(LABEL, row.y, total - LABEL, ROW);
      g.clip();
      spans(g, row, scale, total, paints, onSpan);
      g.restore();
    }
  }

  // Spans that are narrower than a pixel are added up pixel by pixel: the paint's strength is the share of it.
  function spans(g, row, scale, total, paints, onSpan) {
    const tick = data.tick, last = to / tick, y = row.y + 1, height = ROW - 3;
    let pixel = -1, filled = 0, paint = 0;
    const flush = () => {
      if (filled > 0) {
        g.globalAlpha = 1;
        g.fillStyle = paints[paint];
        g.fillRect(pixel, y, Math.max(filled, 0.15), height);
      }
      filled = 0;
    };
    for (let i = search(row.track, from / tick); i < row.track.end && start[i] < last; i++) {
      const left = LABEL + (start[i] * tick - from) * scale, wide = width[i] * tick * scale;
      const dim = wanted && !wanted.has(name[i]);
      if (wide < 1) {
        if (dim) continue;
        const here = Math.floor(left);
        if (here !== pixel || paint !== kind[i]) { flush(); pixel = here; paint = kind[i]; }
        filled = Math.min(1, filled + wide);
        continue;
      }
      flush();
      g.globalAlpha = dim ? 0.14 : SHADES[name[i] % 4];
      g.fillStyle = paints[kind[i]];
      g.fillRect(left, y, wide > 3 ? wide - 0.6 : wide, height);
      if (wide > 46 && !dim) {
        g.globalAlpha = 1;
        g.fillStyle = onSpan;
        const begin = Math.max(left, LABEL) + 4, room = Math.min(left + wide, total) - begin - 4;
        if (room > 38) label(g, data.names[name[i]], begin, row.y + ROW / 2, room);
      }
    }
    flush();
    g.globalAlpha = 1;
  }

  function label(g, text, x, y, room) {
    const fits = Math.floor(room / 6.1);
    g.fillText(text.length > fits ? text.slice(0, Math.max(1, fits - 1)) + "…" : text, x, y);
  }

  function redraw() {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(draw);
  }

  function view(begin, end) {
    const span = Math.min(data.span, Math.max(end - begin, data.tick * 200));
    from = Math.min(Math.max(0, begin), data.span - span);
    to = from + span;
    redraw();
  }

  function zoom(factor, at = (from + to) / 2) {
    view(at - (at - from) * factor, at + (to - at) * factor);
  }

  function timeAt(event) {
    const box = canvas.getBoundingClientRect();
    return from + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (to - from);
  }

  function spanAt(event) {
    const y = event.clientY - canvas.getBoundingClientRect().top, time = timeAt(event);
    const row = rows.find((one) => one.track && one.y <= y && y < one.y + ROW);
    if (!row || time < from) return null;
    const i = search(row.track, time / data.tick);
    const slack = (2 * (to - from)) / canvas.clientWidth;
    return i < row.track.end && start[i] * data.tick <= time + slack ? [row.track, i] : null;
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointerup", () => { drag = null; canvas.classList.remove("held"); });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("held"); });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const moved = ((drag.x - event.clientX) / (canvas.clientWidth - LABEL)) * (drag.to - drag.from);
      view(drag.from + moved, drag.to + moved);
      return showTip(event, "");
    }
    const found = spanAt(event), now = found ? found[1] : null;
    showTip(event, found && `${data.names[name[now]]}\n${seconds(width[now] * data.tick)}, from ${seconds(start[now] * data.tick)}\n` +
      `${data.kinds[kind[now]]}, rank ${found[0].rank}, ${found[0].queue}`);
  });
  canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
  canvas.addEventListener("dblclick", (event) => {
    const found = spanAt(event);
    if (!found) return view(0, data.span);
    const begin = start[found[1]] * data.tick, lasts = width[found[1]] * data.tick;
    view(begin - lasts, begin + 2 * lasts);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.004), timeAt(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const moved = ((event.deltaX || event.deltaY) / canvas.clientWidth) * (to - from);
      view(from + moved, to + moved);
    }
  }, { passive: false });
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), w: () => zoom(0.6), "-": () => zoom(1 / 0.6), s: () => zoom(1 / 0.6),
    ArrowLeft: () => view(from - (to - from) / 6, to - (to - from) / 6), a: () => keys.ArrowLeft(),
    ArrowRight: () => view(from + (to - from) / 6, to + (to - from) / 6), d: () => keys.ArrowRight(),
    Home: () => view(0, data.span), 0: () => view(0, data.span),
  };
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
  });

  const tools = document.querySelector("#timeline .tools");
  tools.querySelector("[data-zoom=in]").addEventListener("click", keys["+"]);
  tools.querySelector("[data-zoom=out]").addEventListener("click", keys["-"]);
  tools.querySelector("[data-zoom=all]").addEventListener("click", keys.Home);
  tools.querySelector("[type=search]").addEventListener("input", (event) => {
    const text = event.target.value.trim().toLowerCase();
    const names = data.names.flatMap((one, i) => (one.toLowerCase().includes(text) ? [i] : []));
    wanted = text ? new Set(names) : null;
    redraw();
  });
  for (const box of tools.querySelectorAll("[type=checkbox]")) {
    box.checked = shown.has(+box.value);
    box.addEventListener("change", () => { shown[box.checked ? "add" : "delete"](+box.value); redraw(); });
  }
  redraws.push(draw);
  draw();
})();
