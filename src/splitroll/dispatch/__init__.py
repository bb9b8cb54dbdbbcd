"""Which engine gets which work: `policy` decides, purely; `dispatcher` carries it out."""
