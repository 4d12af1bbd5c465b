"use strict";
const $ = (query, root = document) => root.querySelector(query);
const state = { preset: 0, path: "", value: "" };
let data;

async function unpack() {
  const bytes = Uint8Array.from(atob($("#data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const text = (number) => data.texts[number].map((line) => data.lines[line]).join("\n");

function option(value, shown = value) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = shown;
  return made;
}

function fields() {
  const preset = data.presets[state.preset];
  $("#fields").replaceChildren(...data.knobs.map(([path, label]) => {
    const field = document.createElement("div"), name = document.createElement("label"), select = document.createElement("select");
    const own = preset.settings[path], turns = preset.turns[path] || {}, turned = path === state.path;
    field.className = turned ? "field turned" : "field";
    name.textContent = label;
    name.htmlFor = select.id = "knob-" + path.replace(".", "-");
    select.dataset.path = path;
    const others = Object.keys(turns);
    select.append(option(own));
    for (const value of others) select.append(option(value, typeof turns[value] === "string" ? value + " (refused)" : value));
    select.value = turned ? state.value : own;
    select.disabled = !others.length;
    field.append(name, select);
    return field;
  }));
}

const WORDS = /("""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(#[^\n]*)|\b(and|as|assert|class|def|del|elif|else|except|False|for|from|if|import|in|is|lambda|None|not|or|pass|raise|return|True|try|while|with|yield)\b|\b(\d+(?:\.\d+)?(?:e-?\d+)?)\b/g;
const escaped = (code) => code.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

function coloured(code) {
  let out = "", at = 0;
  for (const m of code.matchAll(WORDS)) {
    const kind = m[1] ? "s" : m[2] ? "c" : m[3] ? "k" : "n";
    out += escaped(code.slice(at, m.index)) + "<span class=" + kind + ">" + escaped(m[0]) + "</span>";
    at = m.index + m[0].length;
  }
  return out + escaped(code.slice(at));
}

function reductions(config, preset) {
  const body = $("#reduces .body"), list = document.createElement("ul");
  for (const [name, knobs] of config.reduces) {
    const item = document.createElement("li"), link = document.createElement("button"), index = data.presets.findIndex((p) => p.name === name);
    link.type = "button";
    link.textContent = name;
    link.addEventListener("click", () => go(index, "", ""));
    const given = document.createElement("code");
    given.textContent = knobs.join(", ");
    item.append(link, knobs.length ? " given " : " as it is", given);
    list.append(item);
  }
  const note = document.createElement("p");
  note.textContent = config.reduces.length
    ? "Proved, for every input and every length (memkit equiv A B --given ..):"
    : "To no other preset shown here, with the window, momentum, retention or step size switched off.";
  body.replaceChildren(note, list);
}

function show() {
  const preset = data.presets[state.preset], turned = state.path ? preset.turns[state.path][state.value] : preset.config;
  const refused = typeof turned === "string", config = refused ? null : data.configs[turned], label = Object.fromEntries(data.knobs);
  fields();
  $("#preset").value = state.preset;
  $("#back").disabled = !state.path;
  const where = $("#where"), bold = document.createElement("b");
  bold.textContent = preset.name;
  where.replaceChildren(bold, state.path ? ", but " + label[state.path] + ": " + state.value + " instead of " + preset.settings[state.path] : " as shipped");
  const wrong = refused ? turned : config.error || "";
  $("#refused").hidden = !wrong;
  $("#refused pre").textContent = wrong;
  for (const id of ["equation", "rule", "yaml"]) $("#" + id).hidden = refused;
  for (const id of ["reduces", "plan", "source"]) $("#" + id).hidden = Boolean(wrong);
  if (!refused) {
    $("#equation .body").innerHTML = text(config.equation);
    $("#rule .body").innerHTML = text(config.rule);
    const drawing = $("#rule svg");
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", "What one token of " + where.textContent + " reads and writes");
    $("#yaml pre").textContent = text(config.yaml);
  }
  if (!wrong) {
    $("#plan pre").textContent = text(config.plan);
    $("#source pre").innerHTML = coloured(text(config.source));
    $("#source pre").scrollTop = 0;
    reductions(config, preset);
  }
  $("#paper p").textContent = preset.source || "Not stated.";
  history.replaceState(null, "", "#" + preset.name + (state.path ? "&" + state.path + "=" + state.value : ""));
}

function go(preset, path, value) {
  const focused = document.activeElement && document.activeElement.id;
  Object.assign(state, { preset, path, value });
  show();
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
}

function fromAddress() {
  const [name, turn] = decodeURIComponent(location.hash.slice(1)).split("&");
  const preset = data.presets.findIndex((p) => p.name === name);
  if (preset < 0) return go(data.start, "", "");
  const [path, value] = (turn || "").split("=");
  const known = path && (data.presets[preset].turns[path] || {})[value] !== undefined;
  go(preset, known ? path : "", known ? value : "");
}

function theme() {
  const system = matchMedia("(prefers-color-scheme: dark)"), button = $("#theme");
  let dark = system.matches;
  const paint = () => {
    document.documentElement.classList.toggle("dark", dark);
    button.setAttribute("aria-pressed", dark);
  };
  button.addEventListener("click", () => { dark = !dark; paint(); });
  system.addEventListener("change", (event) => { dark = event.matches; paint(); });
  paint();
}

async function start() {
  theme();
  data = await unpack();
  $("#width").textContent = data.width;
  $("#preset").append(...data.presets.map((preset, i) => option(i, preset.name)));
  $("#preset").addEventListener("change", (event) => go(Number(event.target.value), "", ""));
  $("#fields").addEventListener("change", (event) => {
    const path = event.target.dataset.path, value = event.target.value, own = data.presets[state.preset].settings[path];
    go(state.preset, value === own ? "" : path, value === own ? "" : value);
  });
  $("#knobs").addEventListener("submit", (event) => event.preventDefault());
  $("#back").addEventListener("click", () => { go(state.preset, "", ""); $("#preset").focus(); });
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText($("pre", button.parentElement).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  addEventListener("hashchange", fromAddress);
  fromAddress();
  document.documentElement.dataset.ready = "yes";
}
start();
