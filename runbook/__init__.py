"""What an operator runs when something is wrong: one executable and one page for each case."""
