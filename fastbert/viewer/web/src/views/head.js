// Lines between tokens: on the left the queries, on the right the keys.

import { data, format, inSentences, length, tokenName } from '../data.js';
import { element, perFrame, shortened, vector } from '../dom.js';
import { headColour, headDash } from '../colour.js';
import { planesOf } from '../planes.js';
import { change } from '../state.js';

export const label = 'Head';
const ROW = 18;
const BUCKETS = 12;
// A long text has long lines, each of which crosses many tiles of the picture.
const MOST = length > 128 ? 400 : 1500;
// A line with less than this share of the largest weight could not be seen.
const VISIBLE = 0.04;
let drawn = null;

const middle = (token) => token * ROW + ROW / 2 + 4;

// Returns the largest weights from the queries of a range, at most MOST of them.
export function chooseLines(planes, state, first, last) {
  let found = [];
  for (const { head, values } of planes) {
    for (let query = first; query < last; query++) {
      if (state.token >= 0 && query !== state.token) continue;
      for (let key = 0; key < length; key++) {
        const weight = values[query * length + key];
        if (weight > 0 && inSentences(state.pairs, query, key)) found.push({ head, query, key, weight });
      }
    }
  }
  const all = found.length;
  const most = found.reduce((value, { weight }) => Math.max(value, weight), 0);
  found = found.filter(({ weight }) => weight >= VISIBLE * most).sort((a, b) => b.weight - a.weight).slice(0, MOST);
  return { lines: found, left: all - found.length };
}

// One path for each head and step of opacity, so that thousands of lines are few elements.
function paths(lines, width) {
  const most = lines.length ? lines[0].weight : 1;
  const steps = new Map();
  for (const { head, query, key, weight } of lines) {
    const step = Math.max(1, Math.round((weight / most) * BUCKETS));
    const name = `${step} ${head ?? 0}`;
    const line = `M${width.left},${middle(query)}L${width.right},${middle(key)}`;
    steps.set(name, (steps.get(name) ?? '') + line);
  }
  return [...steps].map(([name, d]) => {
    const [step, head] = name.split(' ').map(Number);
    return vector('path', {
      d, fill: 'none', stroke: headColour(head), 'stroke-width': 1.6,
      'stroke-dasharray': headDash(head), 'stroke-opacity': (step / BUCKETS).toFixed(3),
    });
  });
}

function labels(state, first, last, width) {
  const nodes = [];
  for (let token = first; token < last; token++) {
    const common = { y: middle(token) + 4, 'font-size': 12, 'data-token': token };
    const text = shortened(data.tokens[token], width.characters);
    const kind = [data.sentences[token] === 1 ? 'second' : '', data.sentences[token] === -2 ? 'padding' : '', token === state.token ? 'chosen' : ''].join(' ');
    nodes.push(vector('text', { ...common, x: width.left - 6, 'text-anchor': 'end', class: `token ${kind}` }, text));
    nodes.push(vector('text', { ...common, x: width.right + 6, class: `token ${kind}` }, text));
  }
  return nodes;
}

function widths(total) {
  const side = Math.min(170, total * 0.32);
  return { total, left: side, right: total - side, characters: Math.floor(side / 7.4) };
}

export async function draw(panel, state) {
  const planes = await planesOf(state);
  const height = length * ROW + 8;
  const svg = vector('svg', {
    height, role: 'img', 'aria-label': 'Lines from queries on the left to keys on the right',
    onclick: (event) => {
      const token = event.target.closest?.('[data-token]');
      if (token) change({ token: Number(token.dataset.token) === state.token ? -1 : Number(token.dataset.token) });
    },
  });
  const box = element('div', { class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Lines between tokens' }, svg);
  panel.replaceChildren(box);
  const visible = () => {
    const first = Math.floor(box.scrollTop / ROW);
    const rows = Math.ceil(box.clientHeight / ROW);
    return [Math.max(0, first - rows), Math.min(length, first + 2 * rows)];
  };
  let range = [-1, -1];
  const render = () => {
    const [first, last] = visible();
    const rows = Math.ceil(box.clientHeight / ROW);
    if (Math.abs(first - range[0]) < rows / 2 && Math.abs(last - range[1]) < rows / 2) return;
    range = [first, last];
    const width = widths(box.clientWidth);
    svg.setAttribute('width', width.total);
    const all = state.token >= 0 ? [0, length] : [first, last];
    drawn = { ...chooseLines(planes, state, ...all), width, first, last, state };
    svg.replaceChildren(...paths(drawn.lines, width), ...labels(state, first, last, width));
  };
  if (state.token >= 0) box.scrollTop = Math.max(0, middle(state.token) - box.clientHeight / 2);
  render();
  box.addEventListener('scroll', perFrame(render), { passive: true });
  return { summary: summary(state), picture, header: ['head', 'query', 'key', 'value'], rows: top() };
}

function top() {
  return drawn.lines.slice(0, 10).map(({ head, query, key, weight }) => [head ?? 'all', tokenName(query), tokenName(key), format(weight)]);
}

function summary(state) {
  const from = state.token >= 0 ? `from ${tokenName(state.token)}` : 'of the rows in view';
  const { window } = data.layers[state.layer];
  const limit = window === null ? '' : ` This layer attends at most ${window} tokens away.`;
  const left = drawn.left ? ` The ${drawn.left.toLocaleString('en')} smallest are not drawn.` : '';
  return `${drawn.lines.length.toLocaleString('en')} lines ${from}; the opacity is the value, relative to the largest line.${left}${limit}`;
}

function picture() {
  const { width, first, last, lines, state } = drawn;
  const group = vector('g', { transform: `translate(0,${-first * ROW})` }, paths(lines, width), labels(state, first, last, width));
  return { width: width.total, height: (last - first) * ROW + 8, nodes: [group] };
}

