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

function row({ layer, head }, state) {
  const chosen = layer === state.layer && state.heads.includes(head);
  const name = `${data.layers[layer].number}·${head}`;
  const open = element('button', {
    type: 'button', class: 'link', 'aria-label': `Show layer ${data.layers[layer].number}, head ${head}`,
    onclick: () => change({ layer, heads: [head] }),
  }, name);
  return element('tr', { class: chosen ? 'chosen' : null },
    element('th', { scope: 'row' }, open),
    names.map((each) => element('td', {}, showValue(each, headValue(each, layer, head)))));
}

export function panel(state) {
  const header = ['layer', ...names].map((name) => element('th', {
    scope: 'col', 'aria-sort': name === state.sort ? (name === 'layer' ? 'ascending' : 'descending') : null,
  }, element('button', { type: 'button', class: 'link', onclick: () => change({ sort: name }) },
    name === 'layer' ? 'head' : measureLabel(name))));
  const patterns = PATTERNS.map(([name, text]) => element('button', {
    type: 'button', 'aria-pressed': String(state.sort === name), onclick: () => change({ sort: name }),
  }, text));
  return [
    element('h2', {}, 'Measures'),
    element('div', { class: 'row', role: 'group', 'aria-label': 'Sort by a known pattern' }, patterns),
    element('div', { class: 'scroll measures', tabindex: 0, role: 'region', 'aria-label': 'Measures of all heads' },
      element('table', {},
        element('caption', {}, 'Means over the queries; the headings sort.'),
        element('thead', {}, element('tr', {}, header)),
        element('tbody', {}, ordered(state.sort).map((each) => row(each, state))))),
  ];
}
