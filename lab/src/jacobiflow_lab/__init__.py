"""Studies of autoregressive flows: quality metrics, analyses, the paper's tables and figures, a page."""
