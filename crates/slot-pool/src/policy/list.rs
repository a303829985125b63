//! Intrusive lists over numbered things, each oldest first: every change is O(1), and none allocates.

/// The end of a list.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Link {
    list: u32,
    older: u32,
    newer: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// Some lists, which share the things: each is in at most one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lists {
    /// By thing; nothing if it is in no list.
    links: Vec<Option<Link>>,
    ends: Vec<Ends>,
}

impl Lists {
    /// So many empty lists of at most so many things.
    pub(super) fn new(lists: usize, things: usize) -> Self {
        let empty = Ends { oldest: NONE, newest: NONE, len: 0 };
        Self { links: vec![None; things], ends: vec![empty; lists] }
    }

    /// The list that a thing is in.
    pub(super) fn list_of(&self, thing: u32) -> Option<usize> {
        self.links[thing as usize].map(|link| link.list as usize)
    }

    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].len as usize
    }

    /// [`NONE`] if the list is empty.
    pub(super) fn oldest(&self, list: usize) -> u32 {
        self.ends[list].oldest
    }

    /// What came into its list after a thing; [`NONE`] if nothing did.
    pub(super) fn newer(&self, thing: u32) -> u32 {
        self.links[thing as usize].expect("it is in a list").newer
    }

    /// Things of a list, oldest first.
    pub(super) fn oldest_first(&self, list: usize) -> impl Iterator<Item = u32> {
        let some = |thing| (thing != NONE).then_some(thing);
        std::iter::successors(some(self.oldest(list)), move |thing| some(self.newer(*thing)))
    }

    pub(super) fn push_newest(&mut self, list: usize, thing: u32) {
        self.insert_after(list, self.ends[list].newest, thing);
    }

    /// Puts a thing behind the one that is older than it, or first of all behind [`NONE`].
    ///
    /// # Panics
    /// If the thing is in a list already.
    pub(super) fn insert_after(&mut self, list: usize, older: u32, thing: u32) {
        assert!(self.links[thing as usize].is_none(), "a thing is in one list");
        let newer = if older == NONE { self.ends[list].oldest } else { self.newer(older) };
        self.links[thing as usize] = Some(Link { list: list as u32, older, newer });
        self.set_newer(list, older, thing);
        self.set_older(list, newer, thing);
        self.ends[list].len += 1;
    }

    /// Takes a thing out of its list; the list, and what is older there.
    ///
    /// # Panics
    /// If it is in none.
    pub(super) fn unlink(&mut self, thing: u32) -> (usize, u32) {
        let link = self.links[thing as usize].take().expect("it is in a list");
        let Link { list, older, newer } = link;
        let list = list as usize;
        self.set_newer(list, older, newer);
        self.set_older(list, newer, older);
        self.ends[list].len -= 1;
        (list, older)
    }

    fn set_newer(&mut self, list: usize, of: u32, newer: u32) {
        match self.links.get_mut(of as usize) {
            Some(link) => link.as_mut().expect("neighbours are in the list").newer = newer,
            // `NONE` is no thing: this is the list's end.
            None => self.ends[list].oldest = newer,
        }
    }

    fn set_older(&mut self, list: usize, of: u32, older: u32) {
        match self.links.get_mut(of as usize) {
            Some(link) => link.as_mut().expect("neighbours are in the list").older = older,
            // `NONE` is no thing: this is the list's end.
            None => self.ends[list].newest = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(lists: &Lists, list: usize) -> Vec<u32> {
        let things: Vec<u32> = lists.oldest_first(list).collect();
        assert_eq!(things.len(), lists.len(list));
        things
    }

    #[test]
    fn things_come_and_go_anywhere() {
        let mut lists = Lists::new(2, 5);
        for thing in [3, 1, 4] {
            lists.push_newest(0, thing);
        }
        lists.push_newest(1, 0);
        assert_eq!((all(&lists, 0), all(&lists, 1)), (vec![3, 1, 4], vec![0]));
        assert_eq!(lists.unlink(1), (0, 3));
        assert_eq!(all(&lists, 0), [3, 4]);
        lists.insert_after(0, 3, 1);
        lists.insert_after(0, NONE, 2);
        assert_eq!(all(&lists, 0), [2, 3, 1, 4]);
        assert_eq!(lists.unlink(4), (0, 1));
        assert_eq!(lists.unlink(2), (0, NONE));
        assert_eq!(
            (all(&lists, 0), lists.list_of(2), lists.list_of(3)),
            (vec![3, 1], None, Some(0))
        );
    }
}
