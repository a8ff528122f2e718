// Runs before the program of a page. Records which elements listen to which events, and which of
// them got an event of a user. A control is "ELEMENT EVENT", or "ELEMENT keydown KEY".
(() => {
  const plain = EventTarget.prototype.addEventListener;
  const listening = [];
  window.used = new Set();

  // Names an element by its id, by its class if there are many of its kind, or by its label.
  function name(node) {
    if (node === window) return 'window';
    if (node instanceof MediaQueryList) return node.media;
    if (!(node instanceof Element)) return node.constructor.name;
    if (node.id) return `#${node.id}`;
    const tag = node.tagName.toLowerCase();
    const kind = ['thumbnail', 'word', 'offer'].find((each) => node.classList.contains(each));
    if (kind) return `.${kind}`;
    if (node.closest('.head')) return '.head input';
    if (node.closest('th')) return `${tag} in th[scope=${node.closest('th').scope}]`;
    const label = node.getAttribute('aria-label');
    if (node.closest('#view') && tag !== 'button') {
      const view = document.querySelector('[role=tab][aria-selected=true]').id.replace('tab-', '');
      return `${view} ${node.classList.contains('sticky') || !node.classList.length ? tag : `.${node.classList[0]}`}`;
    }
    return `${tag} "${label ?? node.textContent}"`;
  }

  const record = (text) => window.used.add(text);

  EventTarget.prototype.addEventListener = function (type, ...rest) {
    const target = this ?? window;
    // Playwright listens to the window, too.
    const ofPage = new Error().stack.includes(location.pathname);
    if (ofPage && !listening.some(([node, other]) => node === target && other === type)) {
      listening.push([target, type]);
      plain.call(target, type, (event) => {
        if (event.isTrusted) record(`${name(target)} ${type}${type === 'keydown' ? ` ${event.key}` : ''}`);
      }, { capture: true, passive: true });
    }
    return plain.call(target, type, ...rest);
  };

  const NATIVE = 'button, select, input, textarea, a[href], summary';
  plain.call(document, 'click', (event) => {
    const node = event.target.closest?.(NATIVE);
    if (node && event.isTrusted) record(`${name(node)} click`);
  }, true);
  plain.call(document, 'focusin', (event) => { if (event.isTrusted) record(`${name(event.target)} focus`); }, true);

  const isPresent = (node) => !(node instanceof Node) || (node.isConnected && !node.disabled);

  window.controls = () => {
    const found = [];
    for (const [node, type] of listening.filter(([node]) => isPresent(node))) {
      if (type !== 'keydown') found.push(`${name(node)} ${type}`);
      else for (const key of (node.getAttribute('aria-keyshortcuts') ?? '?').split(' ')) found.push(`${name(node)} keydown ${key.replace('Plus', '+')}`);
    }
    const has = (node) => listening.some(([other]) => other === node);
    for (const node of document.querySelectorAll(NATIVE)) if (!has(node)) found.push(`${name(node)} click`);
    for (const node of document.querySelectorAll('[tabindex="0"]')) if (!node.matches(NATIVE)) found.push(`${name(node)} focus`);
    return found;
  };
})();
