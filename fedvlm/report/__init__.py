"""Tables, figures and a page, made from run folders only."""
