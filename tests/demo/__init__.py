"""`make demo`: documents are asked four times, and the table shows what was computed and what was loaded."""
