// Draws the curves of one run, or of several over each other, and draws them again when they have grown.
"use strict";

(() => {
  const LABELS = { step: "step", tokens: "tokens", time: "minutes of training" };
  const MOST_SHADES = 200;
  const MOST_LETTERS = 30;
  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false, scrollZoom: false };
  const state = new WeakMap();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seen = (color) => (color === "#000000" ? css("--ink") : color); // the palette comes with the curves
  const unit = (view, axis) => (axis === "tokens" && view.tokens_per_step ? view.tokens_per_step : 1);
  // The library reads a few tags in names; a name from a store has none.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

  function places(view, trace, axis) {
    if (axis === "time") return trace.seconds.map((value) => value / 60);
    return trace.steps.map((step) => step * unit(view, axis));
  }

  function line(view, name, axis, shown) {
    const trace = view.traces[name];
    if (!trace) return [];
    return [{ x: places(view, trace, axis), y: trace.values, type: "scatter", mode: "lines", hoverlabel: { namelength: -1 }, ...shown }];
  }

  const faint = (color, width = 1) => ({ line: { color, width }, opacity: 0.4, hoverinfo: "skip", showlegend: false });

  function loss(view, axis, color, name, controls) {
    const drawn = [];
    if (axis !== "time") drawn.push(...line(view, "inherited", axis, { name: plain(`${view.ancestors.join(" → ")}, before the fork`), line: { color: css("--soft"), width: 1.4, dash: "dot" } }));
    if (controls.raw) drawn.push(...line(view, "train_loss", axis, faint(color)));
    drawn.push(...line(view, "trend", axis, { name: plain(name), line: { color, width: 2.2 } }));
    return drawn;
  }

  function heldOut(view, axis, color, name) {
    const shown = { name: plain(name), mode: "lines+markers", line: { color, width: 1.2, dash: "dot" }, marker: { size: 7, color, line: { color: css("--ground"), width: 1 } } };
    return line(view, "val_loss", axis, shown);
  }

  function ends(view, axis) {
    return view.ends.map((end) => {
      const x = places(view, end.trace, axis).flatMap((place) => [place, place, null]);
      const y = end.trace.steps.flatMap(() => [0, 1, null]);
      const color = seen(end.color);
      const text = end.trace.steps.flatMap(() => ["", end.count > MOST_LETTERS ? "" : end.letter, ""]);
      const dash = { solid: "solid", dashed: "dash", dotted: "dot", dashdot: "dashdot" }[end.dashes];
      const letters = { mode: "lines+text", text, textposition: "bottom left", textfont: { color, size: 10 } };
      return { x, y, yaxis: "y5", type: "scatter", ...letters, name: plain(`${end.letter} ${end.reason} × ${end.count}`), line: { color, width: 1.2, dash }, hoverinfo: "name+x" };
    });
  }

  function promotions(view, axis) {
    const found = view.promotions.filter((item) => item.val_loss !== null);
    if (!found.length || axis === "time") return [];
    const marker = { symbol: "star", size: 14, color: "#E69F00", line: { color: css("--ink"), width: 1 } };
    return [{ x: found.map((item) => item.step * unit(view, axis)), y: found.map((item) => item.val_loss), text: found.map((item) => plain(item.alias)), type: "scatter", mode: "markers", name: "promoted", marker, hoverinfo: "text+x+y" }];
  }

  // A uniform guess and the champion to beat; a guess far above all that was trained would squeeze the curves.
  function marks(views, axis) {
    const losses = views.flatMap((view) => ["trend", "inherited"].flatMap((name) => view.traces[name]?.values || []));
    const top = 1.05 * losses.reduce((most, value) => Math.max(most, value), 0);
    const shown = new Map(views.flatMap((view) => view.marks).map((mark) => [mark.label, mark]));
    const end = Math.max(1, ...views.map((view) => (axis === "time" ? Math.max(0, ...(places(view, view.traces.trend || { steps: [], seconds: [] }, axis))) : view.total_steps * unit(view, axis))));
    return [...shown.values()].filter((mark) => losses.length && (mark.is_target || mark.loss <= top)).map((mark) => ({
      x: [0, end], y: [mark.loss, mark.loss], type: "scatter", mode: "lines", name: plain(mark.label), hoverinfo: "name+y",
      line: { color: css("--soft"), width: 1.2, dash: mark.is_target ? "dashdot" : "dash" },
    }));
  }

  function shades(view, axis) {
    if (axis === "time") return [];
    return view.replays.slice(-MOST_SHADES).map((item) => ({
      type: "rect", xref: "x", yref: "paper", x0: (item.first_step - 1) * unit(view, axis), x1: item.last_step * unit(view, axis), y0: 0, y1: 1,
      fillcolor: css("--soft"), opacity: 0.16, line: { width: 0 }, layer: "below",
    }));
  }

  const [BYTES, SECONDS] = ["B", "s"].map((ticksuffix) => ({ rangemode: "tozero", tickformat: "~s", ticksuffix }));
  const PANELS = [
    ["lr", "lr", 2, { exponentformat: "e" }], ["grad_norm", "grad norm", 3, { type: "log" }], ["tokens_per_second", "tokens/s", 4, { rangemode: "tozero" }],
    ["memory_bytes", "memory", 6, BYTES], ["data_seconds", "data wait", 7, SECONDS], ["disk_free_bytes", "disk free", 8, BYTES],
  ];
  const LOWEST = "y8";

  function single(view, axis, controls) {
    const color = css("--curve");
    const panel = (yaxis, shown) => ({ yaxis: `y${yaxis}`, name: "", showlegend: false, hoverinfo: "x+y", line: { color, width: 1.2, ...shown } });
    const panels = PANELS.flatMap(([name, , yaxis]) => line(view, name, axis, panel(yaxis)));
    panels.push(...line(view, "rss_bytes", axis, panel(6, { color: css("--soft"), dash: "dot" }))); // beside that of a GPU
    return [...loss(view, axis, color, "train loss (trend)", controls), ...heldOut(view, axis, "#D55E00", "held-out loss"), ...marks([view], axis), ...promotions(view, axis), ...ends(view, axis), ...panels];
  }

  function several(views, axis, controls) {
    return [...marks(views, axis), ...views.flatMap((view) => {
      const color = seen(view.color);
      const held = heldOut(view, axis, color, "").map((trace) => ({ ...trace, showlegend: false }));
      return [...loss({ ...view, traces: { ...view.traces, inherited: undefined } }, axis, color, view.run_id, controls), ...held];
    })];
  }

  function axisStyle(more = {}) {
    return { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true, tickfont: { size: 11 }, ...more };
  }

  function layout(figure, views, axis, controls) {
    const isSingle = views.length === 1;
    const isNarrow = figure.clientWidth < 560;
    const y = (domain, text, more) => axisStyle({ domain, title: { text, standoff: 6, font: { size: 11.5 } }, ...more });
    const own = {
      yaxis: y(isSingle ? [0.55, 1] : [0, 1], "loss", { type: controls.log ? "log" : "linear" }),
      xaxis: axisStyle({ title: { text: LABELS[axis], standoff: 8 }, anchor: isSingle ? LOWEST : "y", rangemode: "tozero" }),
    };
    if (axis !== "time") own.xaxis.range = [0, 1.01 * Math.max(1, ...views.map((view) => view.total_steps * unit(view, axis)))];
    if (isSingle) {
      PANELS.forEach(([, text, number, more], place) => {
        const bottom = (PANELS.length - 1 - place) * 0.09;
        own[`yaxis${number}`] = y([bottom, bottom + 0.06], text, { nticks: 3, ...more });
      });
      own.yaxis5 = { domain: [0.55, 1], overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
    }
    return {
      ...own, uirevision: axis, hovermode: "closest", dragmode: "zoom", showlegend: true, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") } },
      legend: { orientation: "h", y: isSingle ? 1.02 : 1.02, yanchor: "bottom", x: 0, font: { size: isNarrow ? 11 : 12 } },
      margin: { l: isNarrow ? 44 : 58, r: 12, t: 8, b: 44 }, shapes: isSingle ? shades(views[0], axis) : [],
    };
  }

  function read(figure) {
    return { axis: figure.querySelector("[data-axis]").value, log: figure.querySelector("[data-log]").checked, raw: figure.querySelector("[data-raw]").checked };
  }

  async function draw(figure) {
    const { views } = state.get(figure) || {};
    if (!views || !views.length) return;
    const controls = read(figure);
    const traces = views.length === 1 ? single(views[0], controls.axis, controls) : several(views, controls.axis, controls);
    const canvas = figure.querySelector("[data-canvas]");
    const began = performance.now();
    await window.Plotly.react(canvas, traces, layout(figure, views, controls.axis, controls), CONFIG);
    canvas.dataset.milliseconds = Math.round(performance.now() - began);
    canvas.dataset.points = traces.reduce((sum, trace) => sum + trace.x.length, 0);
  }

  async function load(figure) {
    const known = state.get(figure) || {};
    const answer = await fetch(figure.dataset.curves, { cache: "no-store", headers: known.tag ? { "If-None-Match": known.tag } : {} });
    if (answer.status !== 200) return;
    state.set(figure, { tag: answer.headers.get("etag"), views: await answer.json() });
    await draw(figure);
  }

  const figures = () => [...document.querySelectorAll("[data-curves]")];
  const loadAll = () => figures().forEach((figure) => load(figure).catch(() => {})); // live.js says that nothing answers
  document.addEventListener("change", (event) => {
    const figure = event.target.closest("[data-curves]");
    if (figure) draw(figure);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => figures().forEach(draw));
  for (const name of ["refreshed", "plots"]) document.addEventListener(name, loadAll);
  loadAll();
})();
