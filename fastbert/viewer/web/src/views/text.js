// The attention of a token, or of all tokens, over the words; the pieces of a word are joined.

import { data, format, inSentences, length, PADDING, tokenName } from '../data.js';
import { element, isDark, shortened, vector } from '../dom.js';
import { css, heat, ink } from '../colour.js';
import { mean, planesOf } from '../planes.js';
import { change } from '../state.js';

export const label = 'Text';
let drawn = null;

// Units of the text: words with their pieces, special tokens one by one, padding as a whole.
function unitsOfText() {
  const units = [];
  const words = new Map();
  data.words.forEach((word, token) => {
    const sentence = data.sentences[token];
    if (word !== null && words.has(word)) words.get(word).tokens.push(token);
    else if (sentence === PADDING && units.at(-1)?.sentence === PADDING) units.at(-1).tokens.push(token);
    else {
      const surface = word === null ? data.tokens[token] : data.surfaces[word] || data.tokens[token];
      const unit = { text: surface, tokens: [token], sentence };
      if (word !== null) words.set(word, unit);
      units.push(unit);
    }
  });
  for (const unit of units) if (unit.sentence === PADDING) unit.text = `padding × ${unit.tokens.length}`;
  return units;
}

export const UNITS = unitsOfText();
const unitOf = (token) => UNITS.find(({ tokens }) => tokens.includes(token));

// A word receives the sum of what its pieces receive, and sends the mean of what they send.
export function received(values, state) {
  const senders = state.token >= 0 ? unitOf(state.token).tokens : data.tokens.map((_, token) => token).filter((token) => data.sentences[token] !== PADDING);
  return UNITS.map(({ tokens }) => {
    let sum = 0;
    for (const query of senders) {
      for (const key of tokens) if (inSentences(state.pairs, query, key)) sum += values[query * length + key];
    }
    return sum / senders.length;
  });
}

function word(unit, share, value, state) {
  const colour = heat(share, isDark());
  const chosen = state.token >= 0 && unit.tokens.includes(state.token);
  const attributes = {
    class: `word${chosen ? ' chosen' : ''}${unit.sentence === PADDING ? ' padding' : ''}`,
    style: `background:${css(colour)};color:${ink(colour)}`, title: format(value),
  };
  if (unit.sentence === PADDING) return element('span', attributes, unit.text);
  return element('button', {
    ...attributes, type: 'button', 'aria-pressed': String(chosen), 'aria-label': `${unit.text}: ${format(value)}`,
    onclick: () => change({ token: chosen ? -1 : unit.tokens[0] }),
  }, unit.text);
}

export async function draw(panel, state) {
  const values = received(mean(await planesOf(state)), state);
  const most = Math.max(...values) || 1;
  panel.replaceChildren(element('div', { class: 'words', role: 'group', 'aria-label': 'The text; a word shows what it attends to' },
    UNITS.map((unit, at) => word(unit, values[at] / most, values[at], state))));
  drawn = { values, most, width: Math.min(panel.clientWidth, 900) };
  const from = state.token >= 0 ? `From “${unitOf(state.token).text}”` : 'On average over all tokens';
  const order = values.map((_, at) => at).sort((a, b) => values[b] - values[a]);
  return {
    summary: `${from}, most goes to “${UNITS[order[0]].text}” (${format(values[order[0]])}). The strongest colour is ${format(most)}.`,
    picture, header: ['word', 'tokens', 'value'],
    rows: order.slice(0, 10).map((at) => [UNITS[at].text, UNITS[at].tokens.slice(0, 4).map(tokenName).join(' '), format(values[at])]),
  };
}

function picture() {
  const { values, most, width } = drawn;
  const pen = document.createElement('canvas').getContext('2d');
  pen.font = '15px system-ui, sans-serif';
  let [x, y] = [8, 8];
  const nodes = UNITS.flatMap((unit, at) => {
    const text = shortened(unit.text, 60);
    const wide = pen.measureText(text).width + 10;
    if (x + wide > width) [x, y] = [8, y + 30];
    const colour = heat(values[at] / most, isDark());
    const found = [
      vector('rect', { x, y, width: wide, height: 24, rx: 4, fill: css(colour) }),
      vector('text', { x: x + 5, y: y + 17, 'font-size': 15, style: `fill:${ink(colour)}` }, text),
    ];
    x += wide + 4;
    return found;
  });
  return { width, height: y + 36, nodes };
}
