// The state of the page, which the hash of the URL holds, and those who listen to its changes.

import { data, hasPair, heads, length, PADDING } from './data.js';
import { QUANTITIES, quantityOf } from './planes.js';

export const VIEWS = ['model', 'head', 'neuron', 'text', 'matrix'];
export const FILTERS = hasPair ? ['all', 'aa', 'ab', 'ba', 'bb'] : ['all'];
export const SORTS = ['layer', ...data.measures.map(({ name }) => name)];
if (data.layers[0].scores) SORTS.push('score');

const listeners = [];
// The token -1 means all tokens.
export const state = {
  view: 'model', layer: 0, heads: [0], token: -1, quantity: 'attention', pairs: 'all', sort: 'layer',
};

const inside = (text, end, start = 0) => {
  const number = Number.parseInt(text, 10);
  return number >= start && number < end ? number : null;
};

// Returns the valid part of a hash; an unknown name or value is left out.
export function parse(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ''));
  const chosen = (given.get('heads') ?? '').split('.').map((text) => inside(text, heads));
  const found = {
    view: VIEWS.find((name) => name === given.get('view')),
    layer: inside(given.get('layer'), data.layers.length),
    heads: [...new Set(chosen.filter((head) => head !== null))].sort((a, b) => a - b),
    token: inside(given.get('token'), length, -1),
    quantity: quantityOf(given.get('quantity'))?.name,
    pairs: FILTERS.find((name) => name === given.get('pairs')),
    sort: SORTS.find((name) => name === given.get('sort')),
  };
  if (found.heads.length === 0) delete found.heads;
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value != null));
}

export function hash() {
  return `#${new URLSearchParams({ ...state, heads: state.heads.join('.') })}`;
}

// A document in a frame of a notebook has no URL that could be changed.
const inFrame = location.protocol === 'about:';
// Browsers refuse more than 100 new URLs in 30 seconds, which a held arrow key would exceed.
const PAUSE = 350;
let waiting = false;

function writeLink() {
  if (inFrame || waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    history.replaceState(null, '', hash());
  }, PAUSE);
}

export function change(values) {
  Object.assign(state, values);
  writeLink();
  for (const listener of listeners) listener(state);
}

// Chooses the next token that is not padding, or the one before; the first one follows all tokens.
export function step(by) {
  const end = data.sentences.indexOf(PADDING);
  const count = end < 0 ? length : end;
  change({ token: state.token < 0 ? 0 : Math.max(0, Math.min(count - 1, state.token + by)) });
}

// The key bindings of a view with a query token.
export const tokenKeys = {
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
  Escape: () => change({ token: -1 }),
};

export const listen = (listener) => listeners.push(listener);

export function start() {
  Object.assign(state, parse(location.hash));
  addEventListener('hashchange', () => change(parse(location.hash)));
}

export { QUANTITIES };
