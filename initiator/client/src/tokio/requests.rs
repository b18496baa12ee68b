//! [`Requests`]: the requests of tasks, from the first poll of their futures to their ends. Pure.
//!
//! Invariants:
//! - A request under way keeps its place when its future is dropped. Its completion frees the
//!   place, so no completion is taken for another request's.
//! - No waker and no request is dropped here: a drop runs code of the program, which may come back
//!   to this table. They are returned.

use std::collections::VecDeque;
use std::task::Waker;

use crate::{Completion, Reason, Request};

/// The state of a request.
#[derive(Debug)]
enum RequestSlot {
    Free,
    /// The request waits until the queue takes one more.
    Waits(Request, Waker),
    UnderWay(Waker),
    /// The request is under way, and its future is dropped.
    GivenUp,
    Ended(RequestEnd),
}

/// The end of a request.
#[derive(Debug)]
pub(super) enum RequestEnd {
    Completed(Completion),
    /// The queue refused the request.
    Refused(Request, Reason),
    /// The request was not sent, because the handle is closed or the queue is gone.
    Unsent(Request),
    /// The queue is gone, and the buffer with it.
    Lost,
}

/// The receiver of a completion.
#[derive(Debug)]
pub(super) enum CompletionReceiver {
    /// A future, to be woken.
    Future(Waker),
    /// The future is dropped. The drop of the completion frees the buffer.
    Nobody(Completion),
}

/// The leftovers of a dropped future: to be dropped when nothing is borrowed.
#[derive(Debug)]
pub(super) struct GivenUpRequest(#[allow(dead_code)] RequestSlot);

/// The requests of tasks, by number.
#[derive(Debug)]
pub(super) struct Requests {
    places: Vec<RequestSlot>,
    free: Vec<usize>,
    // Requests that wait for their turn, in order.
    waiting: VecDeque<usize>,
    given_up: usize,
}

impl Requests {
    /// An empty table, with room for twice `depth` requests before it allocates.
    pub(super) fn new(depth: usize) -> Self {
        let room = depth.saturating_mul(2);
        let (places, free) = (Vec::with_capacity(room), Vec::with_capacity(room));
        Self { places, free, waiting: VecDeque::with_capacity(room), given_up: 0 }
    }

    /// Requests that wait for their turn.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests under way after their futures were dropped.
    pub(super) fn given_up(&self) -> usize {
        self.given_up
    }

    /// Puts a request behind all waiting ones. Returns its number.
    pub(super) fn put(&mut self, request: Request, waker: Waker) -> usize {
        let place = RequestSlot::Waits(request, waker);
        let at = match self.free.pop() {
            Some(at) => {
                self.places[at] = place;
                at
            }
            None => {
                self.places.push(place);
                self.places.len() - 1
            }
        };
        self.waiting.push_back(at);
        at
    }

    /// Takes the next waiting request, with its number. The request counts as under way.
    pub(super) fn next_waiting(&mut self) -> Option<(usize, Request)> {
        let at = self.waiting.pop_front()?;
        match std::mem::replace(&mut self.places[at], RequestSlot::Free) {
            RequestSlot::Waits(request, waker) => {
                self.places[at] = RequestSlot::UnderWay(waker);
                Some((at, request))
            }
            other => {
                debug_assert!(false, "a request that does not wait: {other:?}");
                self.places[at] = other;
                None
            }
        }
    }

    /// Takes a completion. `None`, if no request with its number is under way.
    pub(super) fn complete(&mut self, completion: Completion) -> Option<CompletionReceiver> {
        let at = usize::try_from(completion.token).ok()?;
        match self.places.get(at)? {
            RequestSlot::UnderWay(_) => {
                self.end(at, RequestEnd::Completed(completion)).map(CompletionReceiver::Future)
            }
            RequestSlot::GivenUp => {
                self.places[at] = RequestSlot::Free;
                self.free.push(at);
                self.given_up -= 1;
                Some(CompletionReceiver::Nobody(completion))
            }
            RequestSlot::Free | RequestSlot::Waits(..) | RequestSlot::Ended(_) => None,
        }
    }

    /// A request under way has ended. Returns the waker of its future.
    pub(super) fn end(&mut self, at: usize, end: RequestEnd) -> Option<Waker> {
        match std::mem::replace(&mut self.places[at], RequestSlot::Ended(end)) {
            RequestSlot::UnderWay(waker) => Some(waker),
            other => {
                debug_assert!(false, "a request that is not under way: {other:?}");
                None
            }
        }
    }

    /// Returns the end of a request, and frees its place. Before the end, this waker is kept to be
    /// woken then, and the earlier one is returned.
    pub(super) fn take(&mut self, at: usize, waker: &Waker) -> Result<RequestEnd, Option<Waker>> {
        let mut place = std::mem::replace(&mut self.places[at], RequestSlot::Free);
        let before = match &mut place {
            RequestSlot::Waits(_, known) | RequestSlot::UnderWay(known)
                if !known.will_wake(waker) =>
            {
                Some(std::mem::replace(known, waker.clone()))
            }
            _ => None,
        };
        match place {
            RequestSlot::Ended(end) => {
                self.free.push(at);
                Ok(end)
            }
            place => {
                self.places[at] = place;
                Err(before)
            }
        }
    }

    /// Gives a request up, because its future is dropped.
    pub(super) fn give_up(&mut self, at: usize) -> GivenUpRequest {
        let place = std::mem::replace(&mut self.places[at], RequestSlot::Free);
        match &place {
            RequestSlot::UnderWay(_) => {
                self.places[at] = RequestSlot::GivenUp;
                self.given_up += 1;
            }
            RequestSlot::Waits(..) => {
                self.waiting.retain(|waiting| *waiting != at);
                self.free.push(at);
            }
            RequestSlot::Ended(_) => self.free.push(at),
            RequestSlot::Free | RequestSlot::GivenUp => {
                debug_assert!(false, "no request: {place:?}")
            }
        }
        GivenUpRequest(place)
    }

    /// Ends requests that wait for their turn: they are not sent. Returns the wakers of their
    /// futures.
    pub(super) fn end_waiting(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::with_capacity(self.waiting.len());
        while let Some((at, request)) = self.next_waiting() {
            wakers.extend(self.end(at, RequestEnd::Unsent(request)));
        }
        wakers
    }

    /// The queue is gone: no completion comes. Returns the wakers of all futures.
    pub(super) fn end_all(&mut self) -> Vec<Waker> {
        let mut wakers = self.end_waiting();
        for at in 0..self.places.len() {
            match self.places[at] {
                RequestSlot::UnderWay(_) => wakers.extend(self.end(at, RequestEnd::Lost)),
                RequestSlot::GivenUp => {
                    self.places[at] = RequestSlot::Free;
                    self.free.push(at);
                }
                RequestSlot::Free | RequestSlot::Waits(..) | RequestSlot::Ended(_) => {}
            }
        }
        self.given_up = 0;
        wakers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waker() -> &'static Waker {
        Waker::noop()
    }

    fn put(requests: &mut Requests) -> usize {
        requests.put(Request::flush(), waker().clone())
    }

    #[test]
    fn requests_take_their_turns_in_the_order_in_which_they_came() {
        let mut requests = Requests::new(2);
        let numbers: Vec<_> = (0..5).map(|_| put(&mut requests)).collect();
        drop(requests.give_up(numbers[1]));
        assert_eq!(requests.waiting(), 4);
        let turns = std::iter::from_fn(|| requests.next_waiting()).map(|(at, _)| at);
        let turns: Vec<_> = turns.collect();
        assert_eq!(turns, [numbers[0], numbers[2], numbers[3], numbers[4]]);
        assert_eq!((requests.waiting(), requests.given_up()), (0, 0));
    }

    #[test]
    fn the_place_of_a_request_under_way_is_not_given_to_another_one() {
        let mut requests = Requests::new(2);
        let first = put(&mut requests);
        assert!(requests.next_waiting().is_some());
        drop(requests.give_up(first));
        assert_eq!(requests.given_up(), 1);
        let second = put(&mut requests);
        assert_ne!(first, second, "its completion would be taken for the other one's");
        assert!(requests.take(second, waker()).is_err());
        // A waiting request is not in the queue yet: its place is free at once.
        drop(requests.give_up(second));
        assert_eq!(put(&mut requests), second);
    }

    #[test]
    fn every_waiting_task_hears_that_the_queue_is_gone() {
        let mut requests = Requests::new(2);
        let [sent, given_up] = [put(&mut requests), put(&mut requests)];
        while requests.next_waiting().is_some() {}
        drop(requests.give_up(given_up));
        let waits = put(&mut requests);
        assert_eq!(requests.end_all().len(), 2);
        assert!(matches!(requests.take(sent, waker()), Ok(RequestEnd::Lost)));
        assert!(matches!(requests.take(waits, waker()), Ok(RequestEnd::Unsent(_))));
        assert_eq!((requests.given_up(), requests.waiting()), (0, 0));
        assert_eq!(requests.free.len(), 3);
    }
}
