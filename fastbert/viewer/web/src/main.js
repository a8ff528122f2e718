// The page: the text and controls above, the view with its summary and table, measures and prediction beside.

import { data, heads, layerName, length, PADDING, tokenName } from './data.js';
import { element, isDark, keys, select, setText, shortened, table } from './dom.js';
import { headColour, headDash } from './colour.js';
import { build as measures, measureLabel, update as drawMeasures } from './measures.js';
import { panel as prediction } from './prediction.js';
import { quantityOf } from './planes.js';
import { savePng, saveSvg } from './save.js';
import { change, FILTERS, hash, listen, QUANTITIES, SORTS, start, state, VIEWS } from './state.js';
import * as head from './views/head.js';
import * as matrix from './views/matrix.js';
import * as model from './views/model.js';
import * as neuron from './views/neuron.js';
import * as text from './views/text.js';

const views = { model, head, neuron, text, matrix };
const app = document.getElementById('app');
const FILTER_NAMES = { all: 'all pairs', aa: 'a → a', ab: 'a → b', ba: 'b → a', bb: 'b → b' };
const parts = {};
let shown = null;

function tabs() {
  const buttons = VIEWS.map((name) => element('button', {
    type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': 'view', onclick: () => change({ view: name }),
  }, views[name].label));
  const move = (by) => () => {
    const next = VIEWS[(VIEWS.indexOf(state.view) + by + VIEWS.length) % VIEWS.length];
    change({ view: next });
    document.getElementById(`tab-${next}`).focus();
  };
  return element('div', { role: 'tablist', 'aria-label': 'Views', class: 'tabs', ...keys({ ArrowRight: move(1), ArrowLeft: move(-1) }) }, buttons);
}

function layerControl() {
  const last = data.layers.length - 1;
  const slider = element('input', { type: 'range', id: 'layer', min: 0, max: last, value: 0, oninput: () => change({ layer: Number(slider.value) }) });
  parts.layer = slider;
  parts.layerName = element('output', { for: 'layer' });
  return element('div', { class: 'control' }, element('span', {}, element('label', { for: 'layer' }, 'Layer'), ' ', parts.layerName), slider);
}

function toggle(number) {
  const chosen = state.heads.includes(number) ? state.heads.filter((each) => each !== number) : [...state.heads, number];
  change({ heads: chosen.length ? chosen.sort((a, b) => a - b) : [number] });
}

function headControl() {
  const boxes = Array.from({ length: heads }, (_, number) => element('label', { class: 'head', style: `--colour:${headColour(number)}` },
    element('input', { type: 'checkbox', value: number, onchange: () => toggle(number) }),
    element('span', { class: headDash(number) ? 'swatch dashed' : 'swatch', 'aria-hidden': 'true' }), String(number)));
  parts.heads = boxes.map((box) => box.querySelector('input'));
  const every = element('button', { type: 'button', onclick: () => change({ heads: Array.from({ length: heads }, (_, number) => number) }) }, 'All');
  return element('fieldset', { class: 'control heads' }, element('legend', {}, 'Heads'), boxes, every);
}

function controls() {
  const tokens = data.tokens.map((_, token) => token).filter((token) => data.sentences[token] !== PADDING);
  const options = [[-1, 'all tokens'], ...tokens.map((token) => [token, `${token} ${data.tokens[token]}`])];
  const sorts = SORTS.map((name) => [name, name === 'layer' ? 'layer and head' : measureLabel(name)]);
  return element('div', { class: 'controls', role: 'group', 'aria-label': 'What is shown' },
    layerControl(), headControl(),
    select('token', 'Query token', options, (value) => change({ token: Number(value) })),
    select('quantity', 'Quantity', QUANTITIES.map(({ name, label }) => [name, label]), (quantity) => change({ quantity })),
    FILTERS.length > 1 && select('pairs', 'Sentences', FILTERS.map((name) => [name, FILTER_NAMES[name]]), (pairs) => change({ pairs })),
    select('sort', 'Sort heads by', sorts, (sort) => change({ sort })));
}

function fileName() {
  return `attention-${state.view}-${data.layers[state.layer].number}-${state.heads.join('.')}`;
}

async function copyLink() {
  const link = location.href.split('#')[0] + hash();
  try {
    await navigator.clipboard.writeText(link);
    say('The link was copied.');
  } catch {
    say(`The link is in the address bar: ${hash()}`);
  }
}

function say(words) {
  parts.status.textContent = words;
}

function saving() {
  const save = (work) => () => (shown?.picture ? work(shown.picture(), fileName()) : say('This view has no picture.'));
  const themes = element('button', { type: 'button', onclick: () => {
    document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
    change({});
  } }, 'Light or dark');
  return element('div', { class: 'row', role: 'group', 'aria-label': 'Link, picture and theme' },
    element('button', { type: 'button', id: 'copy', onclick: copyLink }, 'Copy link'),
    element('button', { type: 'button', id: 'svg', onclick: save(saveSvg) }, 'Save SVG'),
    element('button', { type: 'button', id: 'png', onclick: save(savePng) }, 'Save PNG'), themes);
}

// The text, or both texts of a pair with the letters that the sentences have in the controls.
function texts() {
  const letter = (at) => data.texts.length > 1 && element('b', {}, `${'ab'[at]} `);
  return data.texts.map((text, at) => element('p', { class: 'text' }, letter(at), shortened(text, 240)));
}

function build() {
  document.title = data.title;
  parts.view = element('div', { id: 'view', role: 'tabpanel', class: 'view' });
  parts.summary = element('p', { id: 'summary', 'aria-live': 'polite' });
  parts.status = element('p', { class: 'note', role: 'status', id: 'status' });
  parts.table = element('details', {}, element('summary', {}, 'The largest values as a table'), element('div', { id: 'largest', tabindex: 0, role: 'region', 'aria-label': 'The largest values' }));
  parts.panels = Object.fromEntries(VIEWS.map((name) => [name, element('div', { class: 'panel' })]));
  app.replaceChildren(
    element('header', {},
      element('h1', {}, data.title),
      texts(),
      element('p', { class: 'note' }, `${data.layers.length} of ${data.layerCount} layers, ${heads} heads, ${length} tokens. The weights in this file differ from the model's by at most ${data.largestError.toPrecision(2)}.`),
      element('div', { class: 'bars' }, tabs(), saving()), controls(), parts.status),
    element('main', {},
      element('section', { class: 'shown', 'aria-label': 'View' }, parts.summary, parts.view, parts.table),
      element('aside', { 'aria-label': 'Prediction and measures' }, prediction(), measures())));
}

function setControls() {
  for (const name of VIEWS) {
    const tab = document.getElementById(`tab-${name}`);
    tab.setAttribute('aria-selected', String(name === state.view));
    tab.tabIndex = name === state.view ? 0 : -1;
  }
  parts.view.setAttribute('aria-labelledby', `tab-${state.view}`);
  parts.layer.value = state.layer;
  setText(parts.layerName, String(data.layers[state.layer].number));
  parts.layer.setAttribute('aria-valuetext', layerName(state.layer));
  const { byHead } = quantityOf(state.quantity);
  for (const [number, box] of parts.heads.entries()) {
    box.checked = state.heads.includes(number);
    box.disabled = !byHead && state.view !== 'neuron';
  }
  for (const name of ['token', 'quantity', 'pairs', 'sort']) {
    const box = document.getElementById(name);
    if (box && box.value !== String(state[name])) box.value = state[name];
  }
}

// Each change draws; planes that arrive after a later change are not shown.
let turn = 0;
async function draw() {
  const mine = ++turn;
  setControls();
  parts.view.setAttribute('aria-busy', 'true');
  const wait = setTimeout(() => say('Computing …'), 300);
  const now = { ...state, heads: [...state.heads] };
  const loaded = await views[now.view].load(now);
  clearTimeout(wait);
  if (mine !== turn) return;
  const panel = parts.panels[now.view];
  const focused = parts.view.contains(document.activeElement);
  if (parts.view.firstChild !== panel) parts.view.replaceChildren(panel);
  shown = views[now.view].show(panel, now, loaded);
  // A focused control that is gone hands the focus to the tab of the view.
  if (focused && !parts.view.contains(document.activeElement)) document.getElementById(`tab-${now.view}`).focus();
  if (parts.status.textContent === 'Computing …') say('');
  setText(parts.summary, shown.summary);
  const words = { all: '' }[now.pairs] ?? `, ${FILTER_NAMES[now.pairs]}`;
  parts.table.lastChild.replaceChildren(table(`${quantityOf(now.quantity).label}, ${layerName(now.layer)}${words}`, shown.header, shown.rows));
  parts.view.removeAttribute('aria-busy');
}

start();
build();
listen(draw);
listen(drawMeasures);
let width = innerWidth;
addEventListener('resize', () => {
  if (innerWidth !== width) draw();
  width = innerWidth;
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw());
drawMeasures(state);
draw().then(() => { document.documentElement.dataset.ready = 'true'; });
