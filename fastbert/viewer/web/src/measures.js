// The measures of all heads: values, order, and the table beside the views.

import { data, format, heads } from './data.js';
import { element } from './dom.js';
import { change, SORTS } from './state.js';

export function measureLabel(name) {
  if (name === 'score') return 'gradient × attention';
  return data.measures.find((each) => each.name === name)?.label ?? name;
}

export function headValue(name, layer, head) {
  const entry = data.layers[layer];
  return name === 'score' ? entry.scores[head] : entry.measures[name][head];
}

export function showValue(name, value) {
  const unit = data.measures.find((each) => each.name === name)?.unit;
  return unit === 'share' ? `${(100 * value).toFixed(1)} %` : format(value);
}

const all = data.layers.flatMap((_, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head })));

// Returns all heads, by layer or with the largest value of a measure first.
export function ordered(sort) {
  if (sort === 'layer') return all;
  return [...all].sort((a, b) => headValue(sort, b.layer, b.head) - headValue(sort, a.layer, a.head));
}

const names = SORTS.filter((name) => name !== 'layer');
const PATTERNS = [
  ['next', 'Next word'], ['previous', 'Previous word'], ['same', 'Same sentence'], ['separator', 'Delimiter'],
];

function row({ layer, head }) {
  const open = element('button', {
    type: 'button', class: 'link', 'aria-label': `Show layer ${data.layers[layer].number}, head ${head}`,
    onclick: () => change({ layer, heads: [head] }),
  }, `${data.layers[layer].number}·${head}`);
  return element('tr', {},
    element('th', { scope: 'row' }, open),
    names.map((each) => element('td', {}, showValue(each, headValue(each, layer, head)))));
}

const parts = {};

export function build() {
  parts.header = new Map(['layer', ...names].map((name) => [name, element('th', { scope: 'col' },
    element('button', { type: 'button', class: 'link', onclick: () => change({ sort: name }) }, name === 'layer' ? 'head' : measureLabel(name)))]));
  parts.patterns = new Map(PATTERNS.map(([name, text]) => [name, element('button', { type: 'button', onclick: () => change({ sort: name }) }, text)]));
  parts.rows = new Map(all.map((each) => [each, row(each)]));
  parts.body = element('tbody', {});
  return element('section', { 'aria-label': 'Measures' },
    element('h2', {}, 'Measures'),
    element('div', { class: 'row', role: 'group', 'aria-label': 'Sort by a known pattern' }, ...parts.patterns.values()),
    element('div', { class: 'scroll measures', tabindex: 0, role: 'region', 'aria-label': 'Measures of all heads' },
      element('table', {},
        element('caption', {}, 'Means over the queries; the headings sort.'),
        element('thead', {}, element('tr', {}, ...parts.header.values())),
        parts.body)));
}

// Marks the chosen heads and the order. A new order moves the rows, in which the focus stays.
export function update({ layer, heads: chosen, sort }) {
  for (const [{ layer: own, head }, node] of parts.rows) node.classList.toggle('chosen', own === layer && chosen.includes(head));
  if (parts.sort === sort) return;
  parts.sort = sort;
  const focus = document.activeElement;
  parts.body.replaceChildren(...ordered(sort).map((each) => parts.rows.get(each)));
  if (parts.body.contains(focus)) focus.focus();
  for (const [name, node] of parts.patterns) node.setAttribute('aria-pressed', String(name === sort));
  for (const [name, node] of parts.header) {
    if (name === sort) node.setAttribute('aria-sort', name === 'layer' ? 'ascending' : 'descending');
    else node.removeAttribute('aria-sort');
  }
}
