"""The report as a page: one file with its style and its drawings, which loads nothing from anywhere.

`document` puts it together, `charts` draws SVG, `scale` chooses axes; `page.css` has light and dark.
"""

from medialane.compare.page.document import page_of

__all__ = ["page_of"]
