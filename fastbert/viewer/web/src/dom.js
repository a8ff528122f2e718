// Elements of the page. Text is always set as text, never as markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function vector(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function select(id, label, options, onchange) {
  const choices = options.map(([value, text]) => element('option', { value }, text));
  const box = element('select', { id, onchange: () => onchange(box.value) }, choices);
  return element('div', { class: 'control' }, element('label', { for: id }, label), box);
}

// Calls a function at most once per frame.
export function perFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

// The same text would cost a layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function table(caption, header, rows) {
  const cells = (name, values) => values.map((value) => element(name, name === 'th' ? { scope: 'col' } : {}, String(value)));
  return element('table', {},
    element('caption', {}, caption),
    element('thead', {}, element('tr', {}, cells('th', header))),
    element('tbody', {}, rows.map((row) => element('tr', {}, cells('td', row)))));
}

// Pixels of the screen per CSS pixel.
export const ratio = () => Math.min(devicePixelRatio || 1, 3);

// Clears a canvas and makes it as sharp as the screen; the pen draws in CSS pixels. A new size costs
// new memory, so that it is only set if it changes.
export function sized(canvas, width, height) {
  const [columns, rows] = [Math.round(width * ratio()), Math.round(height * ratio())];
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext('2d');
  pen.setTransform(ratio(), 0, 0, ratio(), 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// Attributes of an element with key bindings, which assistive programs can list.
export function keys(bindings) {
  return {
    'aria-keyshortcuts': Object.keys(bindings).map((key) => (key === '+' ? 'Plus' : key)).join(' '),
    onkeydown: (event) => {
      const work = bindings[event.key];
      if (!work || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      work(event);
    },
  };
}

export const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const isDark = () => themed('--dark') === '1';

export function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
