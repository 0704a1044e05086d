"""From the product for query, key and value to turned queries and rows as a cache keeps them."""
