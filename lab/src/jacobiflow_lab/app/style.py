"""How the page looks; fonts are those of the visitor's own system."""

from __future__ import annotations

from typing import Any

SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

CSS = """
.gradio-container { --jf-soft: color-mix(in srgb, var(--body-text-color) 72%, transparent);
  --body-text-color-subdued: var(--jf-soft); --block-info-text-color: var(--jf-soft); }
.gradio-container { width: 100% !important; max-width: 1400px !important; margin: 0 auto !important; }
.jf-head h1 { margin: 0; font-size: 1.5rem; }
.jf-head p { margin: .2rem 0 0; color: var(--jf-soft); }
.jf-note { color: var(--jf-soft); margin: .4rem 0; font-size: .9rem; }
.jf-accent { color: #ea580c; } .jf-quiet { color: #8a8a94; }
.jf-cards { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); }
.jf-card { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: .5rem .7rem;
  display: flex; flex-direction: column; justify-content: space-between; }
.jf-card span { font-size: .8rem; color: var(--jf-soft); }
.jf-card b { font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.jf-grid { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr));
  margin-top: .6rem; }
.jf-curves { grid-template-columns: repeat(auto-fill, minmax(min(12.5rem, 100%), 1fr)); }
.jf-complaint { border: 1px solid #dc2626; border-radius: 8px; padding: .5rem .7rem; margin: 0; }
.jf-status .pending { opacity: 0; }
.jf-message:not(:has(.jf-complaint)) { display: none; }
#upload a { pointer-events: none; color: inherit; }
#labels .token { padding: 0 .2rem 0 .4rem; }
.jf-pair { grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); }
.jf-small { grid-template-columns: repeat(auto-fit, minmax(min(9rem, 45%), 1fr)); }
.jf-figure { margin: 0; min-width: 0; }
.jf-figure img { width: 100%; max-width: 34rem; image-rendering: pixelated; border-radius: 4px;
  display: block; margin: .2rem 0; }
.jf-small img { max-width: 15rem; }
.jf-figure figcaption { font-size: .85rem; color: var(--jf-soft); overflow-wrap: anywhere; }
.jf-figure figcaption b { color: var(--body-text-color); font-size: .95rem; }
.jf-curves svg { width: 100%; height: auto; max-width: 26rem; color: var(--body-text-color); }
.jf-bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content; gap: .35rem .7rem;
  align-items: center; font-size: .88rem; font-variant-numeric: tabular-nums; }
.jf-track { background: var(--border-color-primary); border-radius: 4px; height: .8rem; overflow: hidden; }
.jf-track i { display: block; height: 100%; background: #ea580c; min-width: 2px; }
.jf-value { color: var(--jf-soft); }
.jf-scroll { overflow-x: auto; margin: .6rem 0; }
.jf-table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
.jf-scroll .jf-table th, .jf-scroll .jf-table td { text-align: left; padding: .35rem .9rem .35rem 0;
  white-space: nowrap; border: 0; border-bottom: 1px solid var(--border-color-primary); }
.jf-scroll .jf-table { border: 0; }
@media (max-width: 640px) {
  .gradio-container { padding: .5rem !important; }
  .jf-bars { grid-template-columns: max-content 1fr; }
  .jf-bars .jf-value { grid-column: 1 / -1; margin-bottom: .3rem; }
}
"""


def theme() -> Any:
    """Gradio's own theme without a font from elsewhere."""
    import gradio as gr

    return gr.themes.Default(font=SANS, font_mono=MONO)
