// Lines between tokens: on the left the queries, on the right the keys.
//
// The canvas shows the rows in view. Each frame of scrolling draws the largest lines, and the next
// frames at rest add the smaller ones, so that no line is left out and scrolling stays smooth.

import { data, length, PADDING, sides, tokenName, windowNote } from '../data.js';
import { element, keys, perFrame, ratio, shortened, sized, themed, vector } from '../dom.js';
import { headColour, headDash } from '../colour.js';
import { largestPairs, planesOf } from '../planes.js';
import { change, tokenKeys } from '../state.js';

export const label = 'Head';
const ROW = 18;
const TOP = 4;
// Steps of opacity. A line below the first step could not be seen.
const STEPS = 25;
// Lines that are drawn in one frame; more would take longer than 1/60 s without a GPU.
const PER_FRAME = 500;
// More lines than this hide each other, so that all of them get fainter.
const CROWD = 1500;
let drawn = null;

const middle = (token) => TOP + token * ROW + ROW / 2;

// Returns the largest value of each query over all planes, of the pairs that pass the filter.
function rowMaxima(planes, pass) {
  const most = new Float32Array(length);
  for (const { values } of planes) {
    for (let query = 0; query < length; query++) {
      if (!pass.queries[query]) continue;
      const row = query * length;
      for (let key = 0; key < length; key++) {
        if (pass.keys[key] && values[row + key] > most[query]) most[query] = values[row + key];
      }
    }
  }
  return most;
}

// Returns the step of opacity of each line, in the order of planes, queries and receivers, and how many
// lines each step of each plane has, the largest step first.
function stepsOf(planes, queries, receivers, most) {
  const steps = new Uint8Array(planes.length * queries.length * receivers.length);
  const counts = new Uint32Array(STEPS * planes.length);
  let at = 0;
  for (let number = 0; number < planes.length; number++) {
    const { values } = planes[number];
    for (const query of queries) {
      const row = query * length;
      for (let i = 0; i < receivers.length; i++) {
        const step = (values[row + receivers[i]] / most) * STEPS + 0.5 | 0;
        if (step > 0) counts[(STEPS - step) * planes.length + number] += 1;
        steps[at++] = step;
      }
    }
  }
  return { steps, counts };
}

// Returns the lines from some queries, ordered by steps of opacity, and the groups of one step and one
// plane. The opacity is relative to the largest line.
function chooseLines(queries) {
  const { planes, receivers, maxima } = drawn;
  const senders = queries.filter((query) => maxima[query] > 0);
  const most = senders.reduce((found, query) => Math.max(found, maxima[query]), 0);
  const { steps, counts } = stepsOf(planes, senders, receivers, most);
  let count = 0;
  const ends = counts.map((many) => (count += many) - many);
  const [from, to] = [new Uint16Array(count), new Uint16Array(count)];
  let at = 0;
  for (let number = 0; number < planes.length; number++) {
    for (const query of senders) {
      for (let i = 0; i < receivers.length; i++) {
        const step = steps[at++];
        if (step === 0) continue;
        const line = ends[(STEPS - step) * planes.length + number]++;
        from[line] = query;
        to[line] = receivers[i];
      }
    }
  }
  const fade = Math.min(1, Math.sqrt(CROWD / count));
  const groups = Array.from(counts, (many, group) => ({
    head: planes[group % planes.length].head ?? 0, opacity: fade * (STEPS - Math.floor(group / planes.length)) / STEPS,
    start: ends[group] - many, end: ends[group],
  })).filter(({ start, end }) => end > start);
  return { count, from, to, groups };
}

// Returns the tokens whose rows are in view.
function rowsInView() {
  const { box } = drawn;
  const first = Math.max(0, Math.floor((box.scrollTop - TOP) / ROW));
  const last = Math.min(length, Math.ceil((box.scrollTop + box.clientHeight - TOP) / ROW));
  return Array.from({ length: Math.max(0, last - first) }, (_, at) => first + at);
}

const query = () => (drawn.hovered >= 0 ? drawn.hovered : drawn.state.token);

// Draws the lines with the numbers from `start` to `end`.
function strokeLines(pen, { from, to, groups }, start, end) {
  const { width, box } = drawn;
  pen.lineWidth = 1 / ratio();
  for (const group of groups) {
    const [first, last] = [Math.max(start, group.start), Math.min(end, group.end)];
    if (first >= last) continue;
    pen.globalAlpha = group.opacity;
    pen.strokeStyle = headColour(group.head);
    pen.setLineDash(headDash(group.head).split(' ').filter(Boolean).map(Number));
    pen.beginPath();
    for (let line = first; line < last; line++) {
      pen.moveTo(width.left, middle(from[line]) - box.scrollTop);
      pen.lineTo(width.right, middle(to[line]) - box.scrollTop);
    }
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function writeLabels(pen, rows) {
  const { width, box } = drawn;
  pen.fillStyle = themed('--text');
  pen.textBaseline = 'middle';
  for (const token of rows) {
    pen.font = `${fontOf(token)} 12px system-ui, sans-serif`;
    pen.globalAlpha = data.sentences[token] === PADDING ? 0.6 : 1;
    const text = shortened(data.tokens[token], width.characters);
    pen.textAlign = 'right';
    pen.fillText(text, width.left - 6, middle(token) - box.scrollTop);
    pen.textAlign = 'left';
    pen.fillText(text, width.right + 6, middle(token) - box.scrollTop);
  }
  pen.globalAlpha = 1;
}

const fontOf = (token) => `${data.sentences[token] === 1 ? 'italic' : ''} ${token === query() ? 'bold' : ''}`.trim();

// Draws the rows in view, and then the smaller lines in later frames.
function paint() {
  const { canvas, box } = drawn;
  if (!box.isConnected) return;
  drawn.width = widths(box.clientWidth);
  const pen = sized(canvas, box.clientWidth, box.clientHeight);
  const rows = rowsInView();
  drawn.lines = chooseLines(query() >= 0 ? [query()] : rows);
  strokeLines(pen, drawn.lines, 0, PER_FRAME);
  writeLabels(pen, rows);
  addLines(pen, drawn.lines, PER_FRAME);
}

function addLines(pen, lines, start) {
  drawn.box.toggleAttribute('data-drawing', start < lines.count);
  if (start >= lines.count) return;
  requestAnimationFrame(() => {
    if (drawn.lines !== lines || !drawn.box.isConnected) return;
    strokeLines(pen, lines, start, start + PER_FRAME);
    addLines(pen, lines, start + PER_FRAME);
  });
}

function widths(total) {
  const side = Math.min(170, total * 0.32);
  return { total, left: side, right: total - side, characters: Math.floor(side / 7.4) };
}

// Returns the token whose label is under the pointer, or -1.
function under(event) {
  const place = drawn.box.getBoundingClientRect();
  const [x, y] = [event.clientX - place.left, event.clientY - place.top + drawn.box.scrollTop - TOP];
  const token = Math.floor(y / ROW);
  const onLabel = x < drawn.width.left || x > drawn.width.right;
  return onLabel && token >= 0 && token < length && data.sentences[token] !== PADDING ? token : -1;
}

function hover(token) {
  drawn.canvas.style.cursor = token >= 0 ? 'pointer' : '';
  if (drawn.hovered === token) return;
  drawn.hovered = token;
  drawn.again();
}

function build(panel) {
  const canvas = element('canvas', {
    class: 'sticky', role: 'img', 'aria-label': 'Lines from queries on the left to keys on the right',
    onclick: (event) => {
      const token = under(event);
      if (token >= 0) change({ token: token === drawn.state.token ? -1 : token });
    },
    onpointermove: (event) => hover(under(event)),
    onpointerleave: () => hover(-1),
  });
  const spacer = element('div', { style: `height:${2 * TOP + length * ROW}px`, class: 'spacer' }, canvas);
  const again = perFrame(paint);
  const box = element('div', {
    class: 'scroll tall', tabindex: 0, role: 'region', 'aria-label': 'Lines between tokens; left and right choose the query token, Escape all tokens',
    onscroll: again, ...keys(tokenKeys),
  }, spacer);
  panel.replaceChildren(box);
  return { canvas, box, again, hovered: -1 };
}

export const load = planesOf;

export function show(panel, state, planes) {
  drawn ??= build(panel);
  // A new query token is shown even if the pointer rests on another one.
  if (drawn.state?.token !== state.token) drawn.hovered = -1;
  Object.assign(drawn, { state, planes });
  const name = [state.quantity, state.layer, state.heads, state.pairs].join(' ');
  if (drawn.name !== name) {
    const pass = sides(state.pairs);
    const receivers = Uint16Array.from(data.tokens.keys()).filter((token) => pass.keys[token]);
    Object.assign(drawn, { name, receivers, maxima: rowMaxima(planes, pass) });
  }
  const { box } = drawn;
  const away = state.token >= 0 && Math.abs(middle(state.token) - box.scrollTop - box.clientHeight / 2) > box.clientHeight / 2 - ROW;
  if (away) box.scrollTop = middle(state.token) - box.clientHeight / 2;
  paint();
  return { summary: summary(state), picture, header: ['head', 'query', 'key', 'value'], rows: largestPairs(planes, state) };
}

function summary(state) {
  const from = state.token >= 0 ? `Lines from ${tokenName(state.token)}` : 'Lines from the rows in view';
  return `${from}; the opacity is the value, relative to the largest line. Lines below ${50 / STEPS} % of it are not drawn.${windowNote(state)}`;
}

// The same lines as paths: one for each head and step of opacity.
function paths({ from, to, groups }) {
  const { width } = drawn;
  return groups.map(({ head, opacity, start, end }) => {
    let d = '';
    for (let line = start; line < end; line++) d += `M${width.left},${middle(from[line])}L${width.right},${middle(to[line])}`;
    return vector('path', {
      d, fill: 'none', stroke: headColour(head), 'stroke-width': 1, 'stroke-dasharray': headDash(head), 'stroke-opacity': opacity.toFixed(4),
    });
  });
}

function labels(rows) {
  const { width } = drawn;
  return rows.flatMap((token) => {
    const common = { y: middle(token) + 4, 'font-size': 12, 'font-style': data.sentences[token] === 1 ? 'italic' : null, 'font-weight': token === query() ? 'bold' : null };
    const text = shortened(data.tokens[token], width.characters);
    return [
      vector('text', { ...common, x: width.left - 6, 'text-anchor': 'end' }, text),
      vector('text', { ...common, x: width.right + 6 }, text),
    ];
  });
}

function picture() {
  const { width, box, lines } = drawn;
  const rows = rowsInView();
  const inside = { x: 0, y: 0, width: width.total, height: box.clientHeight };
  const group = vector('g', { transform: `translate(0,${-box.scrollTop})` }, paths(lines), labels(rows));
  return {
    width: width.total, height: box.clientHeight,
    nodes: [vector('clipPath', { id: 'inside' }, vector('rect', inside)), vector('g', { 'clip-path': 'url(#inside)' }, group)],
  };
}
